// found by: static
// A whole row of the weight a thread, loaded ahead into registers.
extern "C" __global__ void __launch_bounds__(64)
row_dot(const float* __restrict__ w, volatile float* x, float* out) {
    float ahead[8];
#pragma unroll
    for (int k = 0; k < 8; k++) ahead[k] = w[k * 64 + threadIdx.x];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += ahead[k] * x[k * 64 + threadIdx.x];
    out[threadIdx.x] = sum;
}
