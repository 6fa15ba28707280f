// found by: dynamic
// cluster of 2: rank 0 multicasts a bulk tile to both CTAs; consumers of both free it by remote arrivals
#include <cstdint>
__device__ inline uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ inline void wait(uint32_t bar, uint32_t ph) {
  asm volatile("{\n.reg .pred P;\nL: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@!P bra L;\n}" :: "r"(bar), "r"(ph) : "memory");
}
__device__ inline void remote_arrive(uint32_t bar, uint32_t rank) {
  asm volatile("{\n.reg .b32 A;\nmapa.shared::cluster.u32 A, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [A];\n}" :: "r"(bar), "r"(rank) : "memory");
}
extern "C" __global__ void __cluster_dims__(2,1,1) __launch_bounds__(160) k(const float* x, float* y) {
  __shared__ __align__(128) float s[2][128];
  __shared__ __align__(8) uint64_t full[2], empty[2];
  int t = threadIdx.x, warp = t / 32; uint32_t rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (t == 0) {
    for (int i = 0; i < 2; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(s32(&full[i])) : "memory");
      asm volatile("mbarrier.init.shared.b64 [%0], 256;" :: "r"(s32(&empty[i])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (warp == 4) {
    if (t % 32 == 0)
    for (int i = 0; i < 6; i++) {
      int st = i & 1;
      if (rank == 0) {
        wait(s32(&empty[st]), ((i >> 1) & 1) ^ 1);
      }
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(s32(&full[st])) : "memory");
      if (rank == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, [%2], %3;"
          :: "r"(s32(s[st])), "l"(x + (blockIdx.x / 2 * 6 + i) * 128), "r"(s32(&full[st])), "h"((uint16_t)3) : "memory");
      else wait(s32(&full[st]), (i >> 1) & 1);
    }
  } else {
    for (int i = 0; i < 6; i++) {
      int st = i & 1;
      wait(s32(&full[st]), (i >> 1) & 1);
      float v = s[st][127 - t];
      remote_arrive(s32(&empty[st]), 0);
      y[(blockIdx.x * 6 + i) * 128 + t] = v;
    }
  }
}
