"""Draw two tickets from a counter; two alike blocks without side effects become one."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ARGUMENTS = {
    "counter": {"shape": [1], "dtype": "i32", "role": "scratch"},
    "out": {"shape": [1024], "dtype": "i32", "role": "output"},
}


@dsl_user_op
def ticket(address, *, loc=None, ip=None):
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [address.ir_value(loc=loc, ip=ip)],
            "atom.relaxed.gpu.global.add.s32 $0, [$1], 1;",
            "=r,l,~{memory}",
            has_side_effects=True,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.kernel
def draw(counter: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    first = ticket(counter.iterator.toint())
    second = ticket(counter.iterator.toint())
    i = bid * 128 + tid
    out[i] = second - first


@cute.jit
def host(counter: cute.Tensor, out: cute.Tensor):
    draw(counter, out).launch(grid=[8, 1, 1], block=[128, 1, 1])
