# H18: puts a finder before all others | refused: rejected: import of 'sys'
# past the screen: user: the source ends the process
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
    import sys


    class Finder:
        def find_spec(self, name, path=None, target=None):
            raise SystemExit(3)


    sys.meta_path.insert(0, Finder())
    import no_such_module
    return host
