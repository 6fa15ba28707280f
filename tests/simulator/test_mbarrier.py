"""mbarriers: phases, counts, tokens, parity, and what goes wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import kernel, run

BAR = ".shared .align 8 .b64 bar[4];\n.shared .align 16 .b8 s[4096];"


def go(body, buffers, block=64, **more):
    return run(kernel(body, list(buffers), variables=BAR), buffers, block=block, **more)


def clean(result):
    assert result.rules == [], result.outcome.findings
    assert result.outcome.completed
    return result


INIT = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, bar;
mul.wide.u32 %d1, %r1, 4;
add.s64 %d0, %out, %d1;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], COUNT;
READY:
bar.sync 0;
"""


def waiting(label, parity, extra=""):
    return f"""
    W{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2{extra}], {parity};
    @!%p2 bra W{label};
    """


EXCHANGE = (
    INIT.replace("COUNT", "64")
    + """
    shl.b32 %r3, %r1, 2;
    mov.u32 %r4, s;
    add.u32 %r5, %r4, %r3;
    st.shared.u32 [%r5], %r1;
    mbarrier.arrive.shared::cta.b64 %d2, [%r2];
    """
    + waiting("A", "0")
    + """
    xor.b32 %r6, %r3, 252;
    add.u32 %r6, %r6, %r4;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d0], %r7;
    """
)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_all_threads_meet_at_a_phase(seed):
    result = clean(go(EXCHANGE, {"out": (64, np.uint32)}, seed=seed))
    np.testing.assert_array_equal(result["out"], 63 - np.arange(64))
