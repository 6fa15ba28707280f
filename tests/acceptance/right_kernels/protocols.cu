#include <cstdint>
typedef unsigned int u32; typedef unsigned long long u64;
// 1. persistent tiles by an atomic counter that the last CTA puts back
extern "C" __global__ void __launch_bounds__(64) persistent(const float* x,float* out,u32* next,u32* done,int tiles){
  __shared__ u32 tile; int t=threadIdx.x;
  while(true){ if(t==0) tile=atomicAdd(next,1u); __syncthreads(); u32 i=tile; __syncthreads(); if(i>=tiles) break; out[i*64+t]=x[i*64+t]*3.f; }
  if(t==0){ __threadfence(); if(atomicAdd(done,1u)==gridDim.x-1){ atomicExch(next,0u); atomicExch(done,0u);} }
}
// 2. in-place state update, one thread a cell, and an output from it
extern "C" __global__ void __launch_bounds__(128) stateup(float* __restrict__ s,const float* __restrict__ x,float* __restrict__ o){
  int i=blockIdx.x*128+threadIdx.x;
  asm volatile("griddepcontrol.wait;":::"memory");
  float v=s[i]*0.5f+*((volatile const float*)x+i); s[i]=v; o[i]=v+1.f;
}
// 3. decoupled look-back over 4 CTAs, tickets for the order, flags packed with values and cleared by the last
extern "C" __global__ void __launch_bounds__(32) lookback(const float* x,float* out,u64* st,u32* tick){
  __shared__ u32 id; int t=threadIdx.x; if(t==0) id=atomicAdd(tick,1u); __syncwarp(); u32 b=*(volatile u32*)&id;
  float v=x[b*32+t]; float s=v; for(int o=1;o<32;o<<=1){ float y=__shfl_up_sync(~0u,s,o); if(t>=o) s+=y; }
  float total=__shfl_sync(~0u,s,31), pre=0.f;
  if(t==0){
    if(b>0){ u64 w; do{ asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];":"=l"(w):"l"(st+b-1):"memory"); }while((w>>32)==0); pre=__uint_as_float((u32)w); asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"::"l"(st+b-1),"l"(0ull):"memory"); }
    if(b<gridDim.x-1){ u64 w=(1ull<<32)|__float_as_uint(pre+total); asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"::"l"(st+b),"l"(w):"memory"); }
    else atomicExch(tick,0u);
  }
  pre=__shfl_sync(~0u,pre,0); out[b*32+t]=s+pre;
}
// 4. uniform branch around a barrier by block; syncthreads_or; loop with uniform trip count
extern "C" __global__ void __launch_bounds__(96) uniform(const float* x,float* out){
  __shared__ float s[96]; int t=threadIdx.x; float a=x[blockIdx.x*96+t];
  if(blockIdx.x&1){ s[t]=a; __syncthreads(); a=s[95-t]; __syncthreads(); }
  for(int i=0;i<=blockIdx.x;i++){ s[t]=a; if(__syncthreads_or(a>1e30f)) break; a+=s[(t+1)%96]; __syncthreads(); }
  out[blockIdx.x*96+t]=a;
}
// 5. warp-aggregated append
extern "C" __global__ void __launch_bounds__(64) append(const float* x,float* out,u32* n){
  int t=threadIdx.x; float v=x[t]; bool keep=v>0.f; u32 m=__ballot_sync(~0u,keep); int lane=t&31; u32 base=0;
  if(lane==0) base=atomicAdd(n,__popc(m)); base=__shfl_sync(~0u,base,0);
  if(keep) out[base+__popc(m&((1u<<lane)-1))]=v;
}
// 6. two roles: one warp copies with cp.async for all, others compute; barriers 1/2
extern "C" __global__ void __launch_bounds__(96) cprole(const float4* x,float* out,int n){
  __shared__ float4 s[2][32]; int t=threadIdx.x,w=t>>5; float a=0.f;
  if(w==0){ for(int i=0;i<n;i++){ int b=i&1; asm volatile("bar.sync %0, 96;"::"r"(3+b):"memory"); u32 d=(u32)__cvta_generic_to_shared(&s[b][t]); asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\ncp.async.commit_group;\ncp.async.wait_group 0;"::"r"(d),"l"(x+i*32+t):"memory"); asm volatile("bar.arrive %0, 96;"::"r"(1+b):"memory"); } }
  else { asm volatile("bar.arrive 3, 96;\nbar.arrive 4, 96;":::"memory"); for(int i=0;i<n;i++){ int b=i&1; asm volatile("bar.sync %0, 96;"::"r"(1+b):"memory"); float4 v=s[b][(t-32)>>1]; a+=v.x+v.z; if(i+2<n) asm volatile("bar.arrive %0, 96;"::"r"(3+b):"memory"); } out[t-32]=a; }
}
// 7. cp.async with mbarrier arrive noinc
extern "C" __global__ void __launch_bounds__(64) cpmbar(const float4* x,float* out){
  __shared__ float4 s[64]; __shared__ u64 b; int t=threadIdx.x; u32 m=(u32)__cvta_generic_to_shared(&b);
  if(t==0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;"::"r"(m):"memory"); __syncthreads();
  u32 d=(u32)__cvta_generic_to_shared(&s[t]); asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"::"r"(d),"l"(x+t):"memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"::"r"(m):"memory");
  asm volatile("{\n.reg .pred P;\nL: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0;\n@P bra D;\nbra L;\nD:\n}"::"r"(m):"memory");
  out[t]=s[63-t].x;
}
// 8. PDL pair: producer triggers early, its dependent waits
extern "C" __global__ void __launch_bounds__(64) producer(const float* x,float* y){ int i=blockIdx.x*64+threadIdx.x; asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;":::"memory"); y[i]=x[i]+1.f; }
extern "C" __global__ void __launch_bounds__(64) consumer(const float* y,float* z){ int i=blockIdx.x*64+threadIdx.x; asm volatile("griddepcontrol.wait;":::"memory"); z[i]=y[255-i]*2.f; }
