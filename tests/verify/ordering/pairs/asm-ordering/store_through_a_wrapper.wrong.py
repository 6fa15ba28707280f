# found by: static
"""Write a row through a store with a cache hint, by a wrapper for assembly."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

ARGUMENTS = {
    "x": {"shape": [1024], "dtype": "f32", "role": "activation"},
    "out": {"shape": [1024], "dtype": "f32", "role": "output"},
}


def assembly(code, constraints, operands, loc, ip, effects=False):
    llvm.inline_asm(
        None,
        operands,
        code,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_hinted(address, value, *, hint="L1::no_allocate", loc=None, ip=None):
    code = f"st.global.{hint}"
    code += ".f32 [$0], $1;"
    operands = [address.ir_value(loc=loc, ip=ip), value.ir_value(loc=loc, ip=ip)]
    assembly(code, "l,f,~{memory}", operands, loc, ip)


@cute.kernel
def double(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * 128 + tid
    v = x[i] * Float32(2.0)
    store_hinted((out.iterator + i).toint(), v)


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    double(x, out).launch(grid=[8, 1, 1], block=[128, 1, 1])
