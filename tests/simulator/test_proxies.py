"""Proxy fences between ordinary stores and asynchronous reads of shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import kernel, run
from tests.simulator.legal import complaint
from workbench.simulator.proxies import Proxies

BODY = """
mov.u32 %r1, tile;
shl.b32 %r2, %r52, 2;
add.u32 %r3, %r1, %r2;
st.shared.u32 [%r3], %r52;
{writer}
bar.sync 0;
setp.eq.u32 %p1, %r52, 0;
{reader}
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 256;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
"""
FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("writer", "reader", "rules"),
    [
        (FENCE, "", []),
        ("", "@%p1 " + FENCE, []),
        ("fence.proxy.async;", "", []),
        ("", "", ["proxy-fence-missing"]),
        ("fence.proxy.async.global;", "", ["proxy-fence-missing"]),
        ("membar.cta;", "", ["proxy-fence-missing"]),
    ],
)
def test_a_bulk_store_wants_a_fence(writer: str, reader: str, rules: list[str]) -> None:
    body = "mov.u32 %r52, %tid.x;" + BODY.format(writer=writer, reader=reader)
    text = kernel(body, ["out"], variables=".shared .align 128 .b8 tile[256];")
    assert complaint(text) == ""
    result = run(text, {"out": (64, np.uint32)}, block=64)
    assert result.rules == rules
    assert result.outcome.counters[0].async_bytes == 256
    assert (result["out"] == np.arange(64)).all()


def test_what_is_followed() -> None:
    p = Proxies(2, 64)
    everything = np.arange(4)
    assert p.unfenced(0, everything) is None
    p.wrote(np.array([[20]]), 4)
    p.wrote(np.array([[96]]), 32)
    assert p.unfenced(0, everything) == 16 and p.unfenced(1, everything + 4) == 32
    p.fence(np.array([0]))
    assert p.unfenced(0, everything) is None and p.unfenced(1, everything + 4) == 32
    p.forget(32, 48)
    assert p.unfenced(1, everything + 4) == 48
    p.forget(48, 64)
    assert p.unfenced(1, everything + 4) is None
    p.wrote(np.array([[0]]), 1)
    assert p.unfenced(0, everything) == 0
