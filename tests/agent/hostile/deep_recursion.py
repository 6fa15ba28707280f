# escape: overflows the stack | refused: user: RecursionError
# past the screen: user: RecursionError
import cutlass.cute as cute

TEMPLATE = {"op": "rmsnorm", "summary": "hostile", "knobs": {"each": [8]}, "default": {"each": 8}}


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    out[0, thread] = x[0, thread]


@cute.jit
def host(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
    kernel(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def build(axes, knobs):
    def down(n):
        return down(n + 1) + 1


    down(0)
    return host
