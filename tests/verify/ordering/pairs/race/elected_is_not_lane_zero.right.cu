// one warp fills its slot, the elected lane publishes to mbarrier-like flag
extern "C" __global__ void __launch_bounds__(64) k(const float* x, float* y) {
  __shared__ float s[1];
  int lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    unsigned p; unsigned l;
    if (lane == 0) s[0] = x[blockIdx.x];
    __syncwarp();
    asm volatile("{.reg .pred P; elect.sync %0|P, 0xffffffff; selp.u32 %1,1,0,P;}" : "=r"(l), "=r"(p));
    if (p) y[blockIdx.x] = s[0];
  }
}
