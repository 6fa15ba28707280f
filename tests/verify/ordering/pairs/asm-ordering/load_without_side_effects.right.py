"""Scale a row; the activation comes through a load written in assembly."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ARGUMENTS = {
    "x": {"shape": [1024], "dtype": "f32", "role": "activation"},
    "out": {"shape": [1024], "dtype": "f32", "role": "output"},
}


@dsl_user_op
def load_streaming(address, *, loc=None, ip=None):
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [address.ir_value(loc=loc, ip=ip)],
            "ld.global.L1::no_allocate.f32 $0, [$1];",
            "=f,l,~{memory}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.kernel
def scale(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * 128 + tid
    cute.arch.griddepcontrol_wait()
    v = load_streaming((x.iterator + i).toint())
    out[i] = v * 2.0


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    scale(x, out).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
