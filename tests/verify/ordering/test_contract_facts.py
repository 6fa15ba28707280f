"""Facts of a contract that let an access stand before the wait; waits that order by mbarriers and loops."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import LOAD_X, STORE, WAIT, audit, clean, contract, ptx, rules

from workbench.errors import ContentError


def _with(terms: str, buffer: str, more: str) -> str:
    """A contract with another line for one buffer."""
    at = terms.index(f'name = "{buffer}"')
    return terms[:at] + more + "\n" + terms[at:]


def test_settled_state_may_be_used_before_the_wait(tmp_path: Path) -> None:
    text = ptx("ld.global.f32 %f1, [%rd5]; st.global.f32 [%rd5], %f1;\n" + WAIT + STORE)
    assert rules(audit(tmp_path, text, contract(x="state"))) == ["pdl-load-before-wait"]
    assert clean(audit(tmp_path, text, _with(contract(x="state"), "x", "settled = true")))


def test_settled_is_no_licence_for_read_only_loads_of_what_is_written(tmp_path: Path) -> None:
    body = "ld.global.nc.f32 %f1, [%rd5];\n" + WAIT + "st.global.f32 [%rd5], %f1;\n" + STORE
    found = audit(tmp_path, ptx(body), _with(contract(x="state"), "x", "settled = true"))
    assert "nc-load-of-mutable" in rules(found)


@pytest.mark.parametrize("role, expected", [("weight", []), ("activation", ["pdl-load-before-wait"])])
def test_pointers_in_a_buffer_lead_where_the_contract_says(
    tmp_path: Path, role: str, expected: list[str]
) -> None:
    body = "ld.global.b64 %rd9, [%rd2]; ld.global.f32 %f1, [%rd9];\n" + WAIT + LOAD_X + STORE
    terms = _with(contract(w="metadata"), "w", f'leads_to = "{role}"')
    assert rules(audit(tmp_path, ptx(body), terms)) == expected


def test_without_that_where_a_pointer_leads_is_undecided(tmp_path: Path) -> None:
    body = "ld.global.b64 %rd9, [%rd2]; ld.global.f32 %f1, [%rd9];\n" + WAIT + LOAD_X + STORE
    found = audit(tmp_path, ptx(body), contract(w="metadata"))
    assert rules(found) == [] and found.coverage.unknown


# -- mbarriers ---------------------------------------------------------------------------------------

_INIT = """
@%p1 mbarrier.init.shared.b64 [%r8], {count};
bar.sync 0;
setp.eq.s32 %p4, %r1, 32;
"""
_FETCH = """
@%p1 mbarrier.arrive.shared.b64 %rd9, [%r8];
@!%p4 bra MET;
griddepcontrol.wait;
mbarrier.arrive.shared.b64 %rd9, [%r8];
MET:
mbarrier.try_wait.parity.shared.b64 %p5, [%r8], 0;
@!%p5 bra MET;
"""


def test_a_phase_that_needs_the_waiting_role_orders(tmp_path: Path) -> None:
    body = _INIT.format(count=2) + _FETCH + LOAD_X + STORE
    assert rules(audit(tmp_path, ptx(body), contract())) == []


def test_a_phase_that_may_end_without_the_waiting_role_does_not(tmp_path: Path) -> None:
    body = _INIT.format(count=1) + _FETCH + LOAD_X + STORE
    found = audit(tmp_path, ptx(body), contract())
    assert found.verdict != "pass" and (found.coverage.unknown or rules(found))


# -- loops -------------------------------------------------------------------------------------------

_LOOP = """
mov.u32 %r10, {start};
AGAIN:
setp.{test}.s32 %p4, %r10, 0;
@%p4 bra GO;
griddepcontrol.wait;
GO:
ld.global.f32 %f1, [%rd5];
add.s32 %r10, %r10, 1;
setp.lt.s32 %p5, %r10, %r9;
@%p5 bra AGAIN;
"""


def test_a_wait_in_the_first_round_holds_for_every_round(tmp_path: Path) -> None:
    body = _LOOP.format(start=0, test="ne") + STORE
    assert clean(audit(tmp_path, ptx(body), contract()))


@pytest.mark.parametrize("start, test", [(1, "ne"), (0, "eq")])
def test_a_wait_that_the_first_round_skips_does_not(tmp_path: Path, start: int, test: str) -> None:
    body = _LOOP.format(start=start, test=test) + STORE
    assert "pdl-load-before-wait" in rules(audit(tmp_path, ptx(body), contract()))


# -- values inside a parameter -----------------------------------------------------------------------


def test_a_value_inside_a_parameter_needs_its_size(tmp_path: Path) -> None:
    terms = contract() + "[[kernel.scalar]]\nparam = 0\noffset = 4\nvalue = 1\n"
    with pytest.raises(ContentError, match="size in bytes"):
        audit(tmp_path, ptx(WAIT + LOAD_X + STORE), terms)


def test_a_value_over_a_pointer_is_refused(tmp_path: Path) -> None:
    terms = contract() + "[[kernel.scalar]]\nparam = 0\noffset = 4\nbytes = 4\nvalue = 1\n"
    with pytest.raises(ContentError, match="both a buffer and a scalar"):
        audit(tmp_path, ptx(WAIT + LOAD_X + STORE), terms)
