// found by: static, dynamic
#include <cstdint>
struct __align__(64) Map { char b[128]; };
__device__ inline uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ inline float f32(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
__device__ inline void wait(uint32_t bar, uint32_t ph) {
  asm volatile("{\n.reg .pred P;\nL: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@!P bra L;\n}" :: "r"(bar), "r"(ph) : "memory");
}
__device__ inline void load(uint32_t dst, const Map* m, int x, int y, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
   :: "r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar) : "memory");
}
// rows x 64 bf16 activations and scales; 4 chunks of K in two stages
extern "C" __global__ void __launch_bounds__(128) k(const __grid_constant__ Map a, const __grid_constant__ Map b, float* out) {
  __shared__ __align__(128) uint16_t sa[2][32 * 64];
  __shared__ __align__(128) uint16_t sb[2][16 * 64];
  __shared__ __align__(8) uint64_t full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(s32(&full[i])) : "memory");
      asm volatile("mbarrier.init.shared.b64 [%0], 96;" :: "r"(s32(&empty[i])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  constexpr uint32_t bytes = sizeof(sa[0]);
  if (t < 32) {
    if (t == 0)
      for (int i = 0; i < 4; i++) {
        int s = i & 1;
        wait(s32(&empty[s]), ((i >> 1) & 1) ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(s32(&full[s])), "r"(bytes) : "memory");
        load(s32(sa[s]), &a, i * 64, blockIdx.x * 32, s32(&full[s]));
        load(s32(sb[s]), &b, i * 64, 0, s32(&full[s]));
      }
  } else {
    float acc = 0;
    int r = (t - 32) % 32, c = (t - 32) % 16;
    for (int i = 0; i < 4; i++) {
      int s = i & 1;
      wait(s32(&full[s]), (i >> 1) & 1);
      for (int k = 0; k < 64; k++) acc += f32(sa[s][r * 64 + k]) * f32(sb[s][c * 64 + k]);
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(s32(&empty[s])) : "memory");
    }
    out[blockIdx.x * 96 + t - 32] = acc;
  }
}
