# H15: captures a CUDA graph to replay it | refused: rejected: `cuStreamBeginCapture`
# past the screen: compiler: "cuda" is an NVIDIA driver library|user:|crash:
import cutlass.cute as cute

TEMPLATE = {"op": "rmsnorm", "summary": "hostile", "knobs": {"each": [8]}, "default": {"each": 8}}


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    out[0, thread] = x[0, thread]


@cute.jit
def host(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
    kernel(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


import cuda.bindings.driver as cuda


def build(axes, knobs):
    cuda.cuStreamBeginCapture(0, 0)
    return host
