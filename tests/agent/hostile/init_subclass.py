# escape: works when a class is derived | refused: rejected: `__init_subclass__`
# past the screen: Permission denied|Read-only file system
import cutlass.cute as cute

TEMPLATE = {"op": "rmsnorm", "summary": "hostile", "knobs": {"each": [8]}, "default": {"each": 8}}


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    out[0, thread] = x[0, thread]


@cute.jit
def host(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
    kernel(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


class Base:
    def __init_subclass__(cls):
        open('/tmp/workbench-hostile-escape', 'w')


class Made(Base):
    pass


def build(axes, knobs):
    return host
