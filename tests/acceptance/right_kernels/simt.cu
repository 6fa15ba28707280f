#include <cstdint>
typedef unsigned int u32;
__device__ __forceinline__ u32 ld_acq(const u32* p){u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];":"=r"(v):"l"(p):"memory"); return v;}
__device__ __forceinline__ void red_rel(u32* p,u32 v){asm volatile("red.release.gpu.global.add.u32 [%0], %1;"::"l"(p),"r"(v):"memory");}
// 1. split-K turnstile: CTAs of one tile add in order
extern "C" __global__ void __launch_bounds__(128) turnstile(const float* x, float* out, u32* sem){
  int t=threadIdx.x, k=blockIdx.x, n=gridDim.x;
  float v = x[k*128+t]*2.f;
  if(t==0){ while(ld_acq(sem)!=(u32)k); }
  __syncthreads();
  if(k==0) out[t]=v; else out[t]+=v;
  __syncthreads();
  if(t==0){ u32 next = (k==n-1)?0:k+1; asm volatile("st.release.gpu.global.u32 [%0], %1;"::"l"(sem),"r"(next):"memory"); }
}
// 2. grid barrier, sense by counting epochs
extern "C" __global__ void __launch_bounds__(64) gridbar(const float* x, float* tmp, float* out, u32* count, u32* gen){
  int t=threadIdx.x, b=blockIdx.x, n=gridDim.x;
  tmp[b*64+t]=x[b*64+t]+1.f;
  __syncthreads();
  if(t==0){
    u32 g = *(volatile u32*)gen;
    __threadfence();
    if(atomicAdd(count,1)==n-1){ *(volatile u32*)count=0; __threadfence(); atomicAdd(gen,1);} 
    else { while(*(volatile u32*)gen==g); }
    __threadfence();
  }
  __syncthreads();
  out[b*64+t]=tmp[((b+1)%n)*64+t];
}
// 3. PDL consumer, all threads wait, weights prefetched
extern "C" __global__ void __launch_bounds__(128) pdlrow(const float* x,const float* __restrict__ w,float* out){
  int i=blockIdx.x*128+threadIdx.x;
  float ww=w[i];
  asm volatile("griddepcontrol.wait;":::"memory");
  float v=x[i];
  asm volatile("griddepcontrol.launch_dependents;");
  out[i]=v*ww;
}
// 4. last block done (sample threadFenceReduction)
extern "C" __global__ void __launch_bounds__(64) lastblock(const float* x,float* part,float* out,u32* cnt){
  __shared__ float s[64]; __shared__ bool last;
  int t=threadIdx.x,b=blockIdx.x;
  s[t]=x[b*64+t]; __syncthreads();
  for(int k=32;k>0;k>>=1){ if(t<k) s[t]+=s[t+k]; __syncthreads(); }
  if(t==0){ part[b]=s[0]; __threadfence(); u32 c=atomicInc(cnt,gridDim.x-1); last=(c==gridDim.x-1);} 
  __syncthreads();
  if(last && t==0){ __threadfence(); float a=0; for(int i=0;i<gridDim.x;i++) a+=part[i]; out[0]=a; }
}
// 5. warp-shuffle reduction with a shared hop, double use of s with two syncs
extern "C" __global__ void __launch_bounds__(256) softmax(const float* x,float* out){
  __shared__ float s[8];
  int t=threadIdx.x; float v=x[blockIdx.x*256+t];
  float m=v; for(int o=16;o;o>>=1) m=fmaxf(m,__shfl_xor_sync(~0u,m,o));
  if((t&31)==0) s[t>>5]=m; __syncthreads();
  m=s[0]; for(int i=1;i<8;i++) m=fmaxf(m,s[i]); __syncthreads();
  float e=__expf(v-m), q=e; for(int o=16;o;o>>=1) q+=__shfl_xor_sync(~0u,q,o);
  if((t&31)==0) s[t>>5]=q; __syncthreads();
  q=0; for(int i=0;i<8;i++) q+=s[i];
  out[blockIdx.x*256+t]=e/q;
}
// 6. warp-synchronous transpose with __syncwarp
extern "C" __global__ void __launch_bounds__(64) warpt(const float* x,float* out){
  __shared__ float s[2][32];
  int t=threadIdx.x,w=t>>5,l=t&31;
  for(int i=0;i<4;i++){ s[w][l]=x[i*64+t]; __syncwarp(); float v=s[w][31-l]; __syncwarp(); out[i*64+t]=v; }
}
// 7. histogram atomics in shared and global
extern "C" __global__ void __launch_bounds__(128) hist(const u32* x,u32* h){
  __shared__ u32 s[16]; int t=threadIdx.x; if(t<16) s[t]=0; __syncthreads();
  atomicAdd(&s[x[blockIdx.x*128+t]&15],1u); __syncthreads();
  if(t<16) atomicAdd(&h[t],s[t]);
}
// 8. two-stage cp.async pipeline
extern "C" __global__ void __launch_bounds__(64) pipe(const float4* x,float* out,int n){
  __shared__ float4 s[2][64]; int t=threadIdx.x; float a=0;
  auto cp=[&](int st,int i){ u32 d=(u32)__cvta_generic_to_shared(&s[st][t]); asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"::"r"(d),"l"(x+i*64+t):"memory"); asm volatile("cp.async.commit_group;":::"memory");};
  cp(0,0);
  for(int i=0;i<n;i++){ if(i+1<n) cp((i+1)&1,i+1); else asm volatile("cp.async.commit_group;":::"memory"); asm volatile("cp.async.wait_group 1;":::"memory"); __syncthreads(); float4 v=s[i&1][63-t]; a+=v.x+v.w; __syncthreads(); }
  out[t]=a;
}
// 9. flag message with 64-bit payload = flag+data packed
extern "C" __global__ void __launch_bounds__(32) packed(const float* x,unsigned long long* box,float* out){
  int t=threadIdx.x;
  if(blockIdx.x==0){ unsigned long long v=((unsigned long long)1<<32)|__float_as_uint(x[t]); asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"::"l"(box+t),"l"(v):"memory"); }
  else { unsigned long long v; do{ asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];":"=l"(v):"l"(box+t):"memory"); }while((v>>32)!=1); out[t]=__uint_as_float((u32)v); asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"::"l"(box+t),"l"(0ull):"memory"); }
}
