# escape: works in the body of a class | refused: rejected: `open`
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


class Body:
    handle = open('/tmp/workbench-hostile-escape', 'w')


def build(axes, knobs):
    return host
