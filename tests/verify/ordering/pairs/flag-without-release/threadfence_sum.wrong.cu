// found by: static
extern "C" __global__ void __launch_bounds__(128)
split_sum(const float* w, float* partial, unsigned* arrived, float* out) {
    __shared__ bool last;
    partial[blockIdx.x * 128 + threadIdx.x] = w[blockIdx.x * 128 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0.0f;
    for (int s = 0; s < 4; s++) sum += partial[s * 128 + threadIdx.x];
    out[threadIdx.x] = sum;
}
