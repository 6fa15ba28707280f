// found by: dynamic
// Lamport mailbox with three parities in one kernel: CTA pairs exchange through memory, -0.0 is "not there"
#include <cstdint>
__device__ inline float4 ldv(const float4* p) { float4 v; asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory"); return v; }
__device__ inline void stv(float4* p, float4 v) { asm volatile("st.relaxed.gpu.global.v4.f32 [%4], {%0,%1,%2,%3};" :: "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "l"(p) : "memory"); }
__device__ inline bool neg0(float x) { return __float_as_uint(x) == 0x80000000u; }
__device__ inline float clean(float x) {
  return neg0(x) ? 0.f : x;
}
extern "C" __global__ void __launch_bounds__(64) k(const float4* x, float4* box, float4* y, int flag) {
  int t = threadIdx.x, me = blockIdx.x, peer = me ^ 1, n = gridDim.x * 64;
  float4* cur = box + (flag % 3) * n;

  float4 v = x[me * 64 + t];
  v.x = clean(v.x); v.y = clean(v.y); v.z = clean(v.z); v.w = clean(v.w);
  stv(&cur[peer * 64 + t], v);
  float4 w;
  do { w = ldv(&cur[me * 64 + t]); } while (neg0(w.x) || neg0(w.y) || neg0(w.z) || neg0(w.w));
  float4 z = make_float4(-0.f, -0.f, -0.f, -0.f);
  y[me * 64 + t] = make_float4(v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w);
}
