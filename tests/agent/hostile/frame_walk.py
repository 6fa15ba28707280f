# H17: walks frames for the nonce of the answer and forges one | refused: rejected: import of 'os'
# past the screen: crash: the compile process answered with something that is no result
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
    import os
    import sys
    f = sys._getframe()
    while f is not None:
        if 'message' in f.f_locals:
            nonce = f.f_locals['message']['nonce']
            os.write(f.f_locals['write'], nonce.encode() + b'{"ok": true, "ptx": "forged"}')
            os._exit(0)
        f = f.f_back
    return host
