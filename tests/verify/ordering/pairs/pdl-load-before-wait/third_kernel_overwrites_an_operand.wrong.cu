// found by: static
// three kernels: quantise -> gemv -> norm in a PDL chain; the middle one waits in warp 0 only and triggers early
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
extern "C" __global__ void __launch_bounds__(128) quant(const float* x, float* q, float* scale) {
  int i = blockIdx.x * 128 + threadIdx.x;
  WAIT;
  TRIGGER;
  q[i] = x[i] * 3;
  if (threadIdx.x == 0) scale[blockIdx.x] = x[i];
}
extern "C" __global__ void __launch_bounds__(128) gemv(const float* w, const float* q, float* h) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float a = w[i];
  if (threadIdx.x < 32) WAIT;
  __syncthreads();
  TRIGGER;
  h[i] = a * *(volatile const float*)&q[i];
}
extern "C" __global__ void __launch_bounds__(128) apply_norm(const float* h, const float* scale, float* y, float* q) {
  int i = blockIdx.x * 128 + threadIdx.x;
#if 0
  float s = *(volatile const float*)&scale[blockIdx.x];
  WAIT;
#else
  q[i] = 0;
  WAIT;
  float s = *(volatile const float*)&scale[blockIdx.x];
#endif
  y[i] = *(volatile const float*)&h[i] * s;
}
