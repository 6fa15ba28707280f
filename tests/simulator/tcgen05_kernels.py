"""PTX kernels around tcgen05 instructions; images of matrices in shared memory, built piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.simulator.kernels import HEADER, Result, run

IMAGE = 1 << 16
"""Bytes of shared memory that a kernel fills from its buffer `image`."""

SETUP = """
mov.u32 %tx, %tid.x;
shr.u32 %warp, %tx, 5;
mov.u32 %bar, bar;
mov.u32 %smem, smem;
setp.eq.u32 %first, %tx, 0;
setp.eq.u32 %zero, %warp, 0;
@%zero tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], COLUMNS;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first mbarrier.init.shared::cta.b64 [bar+8], 1;
mov.u32 %i, %tx;
FILL:
mul.wide.u32 %d0, %i, 4;
add.s64 %d1, %image, %d0;
ld.global.b32 %r0, [%d1];
shl.b32 %r1, %i, 2;
add.u32 %r1, %r1, %smem;
st.shared.b32 [%r1], %r0;
add.u32 %i, %i, 128;
setp.lt.u32 %p0, %i, WORDS;
@%p0 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %tm, [slot];
shr.u32 %r1, %smem, 4;
cvt.u64.u32 %origin, %r1;
"""

WAIT = """
POLL:
mbarrier.try_wait.parity.shared::cta.b64 %p0, [%bar], 0;
@!%p0 bra POLL;
tcgen05.fence::after_thread_sync;
"""

COMMIT = "@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];\n"

FREE = """
bar.sync 0;
@%zero tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%zero tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, COLUMNS;
"""


def read(columns: int, half: bool = False) -> str:
    """Return code that stores `columns` columns of tensor memory to `out`, a row a thread.

    With `half` only the low 16 lanes of each warp are read: threads 0 to 15 of a warp have the even groups of
    16 columns, threads 16 to 31 the odd ones.
    """
    step = 32 if columns >= 32 else columns
    lines = [
        "shl.b32 %r1, %warp, 21;", "add.u32 %r1, %r1, %tm;",
        f"mul.wide.u32 %d0, %tx, {4 * (columns // 2 if half else columns)};", "add.s64 %d0, %out, %d0;",
    ]  # fmt: skip
    for c in range(0, columns, step):
        count = step // 2 if half else step
        names = [f"%v{j}" for j in range(count)]
        if half:
            shape, more = f"16x32bx2.x{count}", f", {count}"
        else:
            shape, more = f"32x32b.x{count}", ""
        lines.append(f"tcgen05.ld.sync.aligned.{shape}.b32 {{{', '.join(names)}}}, [%r1+{c}]{more};")
        lines.append("tcgen05.wait::ld.sync.aligned;")
        base = 4 * (c // 2 if half else c)
        lines += [f"st.global.b32 [%d0+{base + 4 * j}], {n};" for j, n in enumerate(names)]
    return "\n".join(lines) + "\n"


def module(*parts: str, columns: int = 512, target: str = "") -> str:
    """Return a module whose kernel `k` runs the parts one after the other.

    Parameters: `image` (fills shared memory), `out`, `args` (u64 values).
    """
    body = "".join(parts).replace("COLUMNS", str(columns)).replace("WORDS", str(IMAGE // 4))
    return f"""{HEADER}
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 p_image, .param .u64 p_out, .param .u64 p_args)
{{
.shared .align 8 .b64 bar[2];
.shared .align 4 .b32 slot;
.reg .pred %p<8>, %first, %zero;
.reg .b32 %r<16>, %v<128>, %tx, %warp, %bar, %smem, %i, %tm;
.reg .b64 %d<16>, %a<16>, %image, %out, %args, %origin;
.reg .b16 %h<4>;
ld.param.u64 %image, [p_image];
ld.param.u64 %out, [p_out];
ld.param.u64 %args, [p_args];
{body}
ret;
}}
"""


def argument(k: int, register: str, width: int = 64) -> str:
    """Return code that loads value `k` of `args`."""
    return f"ld.global.u{width} {register}, [%args+{8 * k}];\n"


def launch(
    text: str, image: Any, out: int, args: list[int], block: int = 128, **more: Any
) -> tuple[Result, Any]:
    """Run a module; return the result and `out` as uint32 (threads, out)."""
    filled = np.zeros(IMAGE, np.uint8)
    filled[: len(image)] = image
    buffers = {"image": filled, "out": (block * out, np.uint32), "args": np.array(args, np.uint64)}
    result = run(text, buffers, block=block, smem=IMAGE, **more)
    return result, result["out"].reshape(block, out)


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """Return a shared-memory matrix descriptor; `start` relative to the image."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | swizzle << 61


def idesc(
    m: int, n: int, a: int = 0, b: int = 0, d: int = 1, a_mn: bool = False, b_mn: bool = False, more: int = 0
) -> int:
    """Return an instruction descriptor without block scaling; `more` has further bits."""
    return d << 4 | a << 7 | b << 10 | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24 | more


SWIZZLE_WIDTH = {0: 16, 6: 32, 4: 64, 2: 128}


def place(image: Any, start: int, matrix: Any, swizzle: int, k_major: bool = True) -> tuple[int, int, int]:
    """Write a matrix (rows, K) to an image as a canonical layout; return its end, LBO and SBO.

    Done a 16-byte piece at a time. Atoms (8 rows of W bytes) lie one after the other, first along M or N,
    then along K; inside an atom, piece c of row r stands where piece c ^ (r / (128 / W)) would.
    """
    if not k_major:
        matrix = matrix.T
    octets = np.ascontiguousarray(matrix).view(np.uint8)
    rows, length = octets.shape
    width = SWIZZLE_WIDTH[swizzle]
    across = length // width
    groups = -(-rows // 8)
    for r in range(rows):
        for p in range(length // 16):
            atom, c = divmod(p, width // 16)
            c ^= (r % 8) // (128 // width) if swizzle else 0
            at = start + (atom * groups + r // 8) * 8 * width + r % 8 * width + c * 16
            image[at : at + 16] = octets[r, 16 * p : 16 * p + 16]
    near, far = 8 * width, groups * 8 * width
    end = start + across * groups * 8 * width
    if k_major or swizzle:
        return end, far, near
    return end, near, far
