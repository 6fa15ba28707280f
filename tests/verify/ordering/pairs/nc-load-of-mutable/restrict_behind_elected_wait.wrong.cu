// found by: static
// One warp waits for the predecessor and the barrier lets the others go on.
extern "C" __global__ void __launch_bounds__(128)
silu(const float* __restrict__ x, float* __restrict__ out) {
    if (threadIdx.x < 32) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    const int i = blockIdx.x * 128 + threadIdx.x;
    const float v = x[i];
    out[i] = v / (1.0f + __expf(-v));
}
