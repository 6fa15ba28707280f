#include <cstdint>
typedef unsigned int u32; typedef unsigned long long u64;
#define SM(p) ((u32)__cvta_generic_to_shared(p))
__device__ __forceinline__ void mb_init(u64* b,u32 n){asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"::"r"(SM(b)),"r"(n):"memory");}
__device__ __forceinline__ void mb_expect(u64* b,u32 n){asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"::"r"(SM(b)),"r"(n):"memory");}
__device__ __forceinline__ void mb_arrive(u64* b){asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"::"r"(SM(b)):"memory");}
__device__ __forceinline__ void mb_wait(u64* b,u32 ph){asm volatile("{\n.reg .pred P;\nL: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra D;\nbra L;\nD:\n}"::"r"(SM(b)),"r"(ph):"memory");}
__device__ __forceinline__ void bulk_g2s(void* d,const void* s,u32 n,u64* b){asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"::"r"(SM(d)),"l"(s),"r"(n),"r"(SM(b)):"memory");}
// 1. warp specialised: producer warp, 3 consumer warps, 3 stages
extern "C" __global__ void __launch_bounds__(128) ws(const float* x,float* out,int n){
  __shared__ alignas(128) float s[3][96]; __shared__ u64 full[3],empty[3];
  int t=threadIdx.x,w=t>>5;
  if(t==0){for(int i=0;i<3;i++){mb_init(&full[i],1);mb_init(&empty[i],3);} asm volatile("fence.mbarrier_init.release.cluster;":::"memory");}
  __syncthreads();
  if(w==0){ if(t==0) for(int i=0;i<n;i++){int st=i%3; u32 ph=(i/3)&1; mb_wait(&empty[st],ph^1); mb_expect(&full[st],384); bulk_g2s(s[st],x+i*96,384,&full[st]);} }
  else { float a=0; for(int i=0;i<n;i++){int st=i%3; u32 ph=(i/3)&1; mb_wait(&full[st],ph); a+=s[st][t-32]; __syncwarp(); if((t&31)==0) mb_arrive(&empty[st]);} out[t-32]=a; }
}
// 2. single thread issues, all wait, then reuse with __syncthreads
extern "C" __global__ void __launch_bounds__(64) tma1(const float* x,float* out,int n){
  __shared__ alignas(128) float s[64]; __shared__ u64 b; int t=threadIdx.x;
  if(t==0){mb_init(&b,1); asm volatile("fence.proxy.async.shared::cta;":::"memory");} __syncthreads();
  float a=0; for(int i=0;i<n;i++){ if(t==0){mb_expect(&b,256); bulk_g2s(s,x+i*64,256,&b);} mb_wait(&b,i&1); a+=s[63-t]; __syncthreads(); }
  out[t]=a;
}
// 3. epilogue: smem tile to global through bulk store, double use with wait_group.read
extern "C" __global__ void __launch_bounds__(64) store2(const float* x,float* out,int n){
  __shared__ alignas(128) float s[2][64]; int t=threadIdx.x;
  for(int i=0;i<n;i++){
    if(t==0) asm volatile("cp.async.bulk.wait_group.read 1;":::"memory");
    __syncthreads();
    s[i&1][t]=x[i*64+t]*2;
    asm volatile("fence.proxy.async.shared::cta;":::"memory"); __syncthreads();
    if(t==0){ asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;\ncp.async.bulk.commit_group;"::"l"(out+i*64),"r"(SM(s[i&1])):"memory"); }
  }
  if(t==0) asm volatile("cp.async.bulk.wait_group 0;":::"memory");
}
// 4. named barrier ping-pong between two warpgroups
extern "C" __global__ void __launch_bounds__(128) pingpong(const float* x,float* out){
  __shared__ float s[64]; int t=threadIdx.x,g=t>>6,l=t&63;
  float a=0;
  for(int i=0;i<3;i++){
    if(g==0){ s[l]=x[i*64+l]; asm volatile("bar.arrive 1, 128;":::"memory"); asm volatile("bar.sync 2, 128;":::"memory"); }
    else { asm volatile("bar.sync 1, 128;":::"memory"); a+=s[63-l]; asm volatile("bar.arrive 2, 128;":::"memory"); }
  }
  if(g) out[l]=a;
}
// 5. cluster reduction through DSMEM, cluster of 2
extern "C" __global__ void __cluster_dims__(2,1,1) __launch_bounds__(64) clred(const float* x,float* out){
  __shared__ float s[64]; int t=threadIdx.x; u32 r; asm("mov.u32 %0, %%cluster_ctarank;":"=r"(r));
  s[t]=x[blockIdx.x*64+t];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;":::"memory");
  u32 a; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;":"=r"(a):"r"(SM(&s[t])),"r"(r^1)); float v; asm volatile("ld.shared::cluster.f32 %0, [%1];":"=f"(v):"r"(a):"memory");
  out[blockIdx.x*64+t]=v+s[t];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;":::"memory");
}
// 6. st.async to the peer with mbarrier complete_tx
extern "C" __global__ void __cluster_dims__(2,1,1) __launch_bounds__(32) stasync(const u32* x,u32* out){
  __shared__ u32 s[32]; __shared__ u64 b; int t=threadIdx.x; u32 r; asm("mov.u32 %0, %%cluster_ctarank;":"=r"(r));
  if(t==0){mb_init(&b,1); asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); mb_expect(&b,128);}
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;":::"memory");
  u32 d,rb; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;":"=r"(d):"r"(SM(&s[t])),"r"(r^1)); asm volatile("mapa.shared::cluster.u32 %0, %1, %2;":"=r"(rb):"r"(SM(&b)),"r"(r^1));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"::"r"(d),"r"(x[blockIdx.x*32+t]),"r"(rb):"memory");
  mb_wait(&b,0); out[blockIdx.x*32+t]=s[31-t];
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;":::"memory");
}
// 7. elected wait by one warp, mbarrier carries it to the rest; weights by all
extern "C" __global__ void __launch_bounds__(128) pdlmb(const float* x,const float* __restrict__ w,float* out){
  __shared__ u64 b; int t=threadIdx.x;
  if(t==0) mb_init(&b,32); __syncthreads();
  float ww=w[t];
  if(t<32){ asm volatile("griddepcontrol.wait;":::"memory"); mb_arrive(&b); }
  mb_wait(&b,0);
  out[t]=x[t]*ww;
}
// 8. role-aware: warp 0 reads only weights and never waits
extern "C" __global__ void __launch_bounds__(64) roles(const float* x,const float* __restrict__ w,float* out){
  __shared__ float s[32]; int t=threadIdx.x;
  if(t<32) s[t]=w[t];
  else asm volatile("griddepcontrol.wait;":::"memory");
  __syncthreads();
  if(t>=32) out[t-32]=x[t-32]*s[t-32];
}
