// stream-K: CTA that starts in the middle of a tile stores a partial and sets a flag; the owner adds it
extern "C" __global__ void __launch_bounds__(128) k(const float* x, float* ws, unsigned* flags, float* out, unsigned epoch) {
  int t = threadIdx.x, cta = blockIdx.x;           // 6 CTAs, 4 tiles of 3 chunks: each does 2 chunks
  int begin = cta * 2, end = begin + 2;
  while (begin < end) {
    int tile = begin / 3, first = begin % 3;
    int stop = min(end, (tile + 1) * 3);
    float acc = 0;
    for (int c = begin; c < stop; c++) acc += x[c * 128 + t];
    if (first != 0) {
      ws[cta * 128 + t] = acc;
      __syncthreads();
      if (t == 0) { __threadfence(); atomicExch(&flags[cta], epoch); }
    } else {
      if (stop < (tile + 1) * 3) {
        int peer = cta + 1;
        if (t == 0) { while (atomicAdd(&flags[peer], 0) != epoch) {} __threadfence(); }
        __syncthreads();
        acc += ws[peer * 128 + t];
      }
      out[tile * 128 + t] = acc;
    }
    begin = stop;
  }
}
