# bomb: declares a space of ten to the ninth points | refused: the knobs have
import cutlass.cute as cute

TEMPLATE = {
    "op": "rmsnorm",
    "summary": "hostile",
    "knobs": {"k0": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k1": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k2": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k3": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k4": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k5": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k6": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k7": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "k8": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]},
    "default": {"k0": 0, "k1": 0, "k2": 0, "k3": 0, "k4": 0, "k5": 0, "k6": 0, "k7": 0, "k8": 0},
}


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    out[0, thread] = x[0, thread]


@cute.jit
def host(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
    kernel(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def build(axes, knobs):
    return host
