"""Small kernels for the tests of devices."""

from __future__ import annotations

from workbench.devices import Kernel, Slot
from workbench.devices.launch import Launch
from workbench.devices.model import pointers

ADD = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry add_one(.param .u64 p_x, .param .u64 p_out)
{
    .reg .b32 %r<4>; .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p_x];
    ld.param.u64 %rd2, [p_out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r2, [%rd4];
    add.u32 %r3, %r2, 1;
    add.s64 %rd5, %rd2, %rd3;
    st.global.u32 [%rd5], %r3;
    ret;
}
"""


def add_one(times: int = 1, beyond: int = 0, cubin: bytes = b"add") -> Kernel:
    """out = x + 1 for 32 numbers; with two launches state = state + 1 twice; `beyond` adds bytes to x."""
    names = ("x", "out") if times == 1 else ("x", "x")
    first, second = pointers(names)
    if beyond:
        first = type(first)(first.data, (type(first.pointers[0])(0, "x", beyond),))
    launch = Launch("add_one", (1, 1, 1), (32, 1, 1), parameters=(first, second), pdl=True)
    slots = (Slot("x", 128, "activation"), Slot("out", 128, "output"))
    if times > 1:
        slots = (Slot("x", 128, "state"),)
    return Kernel("add one", "sm_90a", (launch,) * times, slots, cubin, ADD)
