// two consumer warpgroups ping-pong through named barriers 1 and 2 over one shared scratch
template<int B> __device__ inline void bsync() { asm volatile("bar.sync %0, 256;" :: "n"(B) : "memory"); }
template<int B> __device__ inline void barrive() { asm volatile("bar.arrive %0, 256;" :: "n"(B) : "memory"); }
extern "C" __global__ void __launch_bounds__(256) k(const float* x, float* y) {
  __shared__ float s[128];
  int t = threadIdx.x, wg = t / 128, l = t % 128;
  if (wg == 1) barrive<1>();          // group 0 may begin
  for (int i = 0; i < 4; i++) {
    if (wg == 0) bsync<1>(); else bsync<2>();
    s[l] = x[((blockIdx.x * 4 + i) * 2 + wg) * 128 + l];
    asm volatile("bar.sync %0, 128;" :: "r"(wg + 3) : "memory");
    float v = s[127 - l];
    if (wg == 0) barrive<2>(); else if (i < 3) barrive<1>();
    y[((blockIdx.x * 4 + i) * 2 + wg) * 128 + l] = v;
  }
}
