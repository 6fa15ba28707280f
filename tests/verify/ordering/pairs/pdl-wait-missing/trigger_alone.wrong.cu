// found by: static, dynamic
// Lets the next kernel start early, and forgot that it starts early itself.
extern "C" __global__ void __launch_bounds__(64)
add_residual(const float4* w, float4* hidden, float4* out) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    const float4 b = w[threadIdx.x];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    float4 v = hidden[i];
    v.x += b.x; v.y += b.y; v.z += b.z; v.w += b.w;
    hidden[i] = v;
    out[i] = v;
}
