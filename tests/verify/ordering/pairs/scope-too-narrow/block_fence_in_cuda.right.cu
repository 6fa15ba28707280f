extern "C" __global__ void __launch_bounds__(128)
two_phases(const float* x, float* mid, float* out, unsigned* arrived) {
    int i = blockIdx.x * 128 + threadIdx.x;
    mid[i] = 2.0f * x[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        unsigned before = atomicAdd(arrived, 1u);
        unsigned target = before - before % gridDim.x + gridDim.x;
        while ((int)(*(volatile unsigned*)arrived - target) < 0) {
        }
        __threadfence();
    }
    __syncthreads();
    out[i] = mid[i ^ 128];
}
