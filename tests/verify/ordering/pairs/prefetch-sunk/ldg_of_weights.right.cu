// Four weights a thread are to be on their way before the predecessor ends.
extern "C" __global__ void __launch_bounds__(128)
gemv_row(const float4* w, float4* x, float* out) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    const float4 a = w[i];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const float4 b = x[threadIdx.x];
    out[i] = a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
