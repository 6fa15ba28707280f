"""Exchange values of neighbouring warps through shared memory; the barrier is assembly."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ARGUMENTS = {
    "x": {"shape": [1024], "dtype": "f32", "role": "activation"},
    "out": {"shape": [1024], "dtype": "f32", "role": "output"},
}


@dsl_user_op
def meet(number, *, loc=None, ip=None):
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(number).ir_value(loc=loc, ip=ip)],
            "{ bar.sync 1, 128; mov.b32 $0, $1; }",
            "=r,r,~{memory}",
            has_side_effects=True,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.kernel
def exchange(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    allocator = cutlass.utils.SmemAllocator()
    row = allocator.allocate_tensor(Float32, cute.make_layout(128), byte_alignment=16)
    row[tid] = x[bid * 128 + tid]
    other = meet(tid ^ 32)
    out[bid * 128 + tid] = row[other]


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    exchange(x, out).launch(grid=[8, 1, 1], block=[128, 1, 1])
