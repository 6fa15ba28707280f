// found by: static
// The bias is a weight and may be read early; x may not.
extern "C" __global__ void __launch_bounds__(256)
add_bias(const float* x, const float* bias, float* out, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    float b = bias[threadIdx.x];
    float v = 0.0f;
    if (i < n) v = *(const volatile float*)(x + i);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (i < n) out[i] = v + b;
}
