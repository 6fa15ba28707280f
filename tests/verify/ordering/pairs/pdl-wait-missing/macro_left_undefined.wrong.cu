// found by: static, dynamic
// The wait stands behind a macro that the build was to define.
#ifdef ENABLE_PDL
#define PDL_WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define PDL_WAIT()
#endif

extern "C" __global__ void __launch_bounds__(128)
rms_scale(float* x, float* inv, float* out) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    PDL_WAIT();
    out[i] = x[i] * inv[blockIdx.x];
}
