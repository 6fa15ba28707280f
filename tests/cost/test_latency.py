"""The latency model: each term does what physics says, and a prediction says what it rests on."""

from __future__ import annotations

from typing import Any

import pytest
from costs import MB, artifact, counters, loads, sass

from workbench.artifact import Artifact
from workbench.cost import load_machine, predict
from workbench.cost.latency import Prediction
from workbench.errors import WorkbenchError

GB300 = load_machine("gb300")


def us(**changes: Any) -> float:
    return one(**changes).us


def one(*, code: Any = None, body: str | None = None, **changes: Any) -> Any:
    made = {
        k: changes.pop(k) for k in ("registers", "smem", "pdl", "threads", "weight_bytes") if k in changes
    }
    ctas = changes.get("ctas", 152)
    if body is not None:
        made["body"] = body
    return predict(artifact(grid=ctas, **made), [counters(**changes)], GB300, code).launches[0]


def test_large_streams_run_at_the_memory_bandwidth() -> None:
    """A gigabyte by many CTAs with enough loads under way takes bytes over bandwidth."""
    p = one(ctas=152 * 16, load_bytes=1000 * MB, weight_bytes=1000 * MB, body=loads(8, together=True))
    floor = 1000 * MB / (GB300.chip.hbm_tb_s * 1e6)
    assert p.limit == "memory" and p.bandwidth_limit == "hbm"
    assert floor < p.us < 1.3 * floor


def test_never_below_the_roofline() -> None:
    for mb in (1, 4, 16, 64, 256):
        p = one(ctas=608, load_bytes=mb * MB, weight_bytes=mb * MB, body=loads(8, together=True))
        assert p.us >= mb / GB300.chip.hbm_tb_s


def test_more_bytes_never_take_less() -> None:
    times = [us(load_bytes=mb * MB, weight_bytes=256 * MB) for mb in (1, 2, 8, 32, 128)]
    assert times == sorted(times) and times[-1] > 2 * times[0]


def test_few_loads_under_way_lower_the_bandwidth() -> None:
    """Little's law: one load at a time by few warps cannot saturate HBM; eight at a time do better."""
    single, eight = (
        one(load_bytes=64 * MB, weight_bytes=64 * MB, code=sass(8, together=t)) for t in (False, True)
    )
    assert single.bandwidth_limit == eight.bandwidth_limit == "bytes in flight"
    assert eight.bandwidth_tb_s == pytest.approx(8 * single.bandwidth_tb_s)
    latency_us = GB300.microseconds(GB300.latency_cycles.dram)
    assert single.bandwidth_tb_s == pytest.approx(152 * 4 * 32 * 16 / latency_us / 1e6)


def test_dependent_loads_take_longer_than_independent_ones() -> None:
    few = {"ctas": 1, "load_bytes": 8 * 16 * 128 + 4096, "longest": {"load_global": 8, "fp32": 15}}
    serial, parallel = (
        one(code=sass(8, together=t), body=loads(8, together=t), **few) for t in (False, True)
    )
    load = GB300.microseconds(GB300.latency_cycles.dram)
    assert serial.terms_us["latency"] > 6 * load and serial.bandwidth_limit == "bytes in flight"
    assert parallel.terms_us["latency"] < 2 * load


def test_idle_sms_cost_bandwidth() -> None:
    assert us(ctas=19, load_bytes=64 * MB) > 3 * us(ctas=152, load_bytes=64 * MB)


def test_tail_wave_costs_as_much_as_a_full_one() -> None:
    """153 CTAs on 152 SMs leave one SM with twice the work: issue time doubles."""
    work = {"instructions": {"fp32": 20_000}, "longest": {"fp32": 20}, "load_bytes": 1 * MB}
    even, odd = one(ctas=152, **work), one(ctas=153, **work)
    assert even.limit == odd.limit == "issue"
    assert odd.terms_us["issue"] == pytest.approx(2 * even.terms_us["issue"])
    assert odd.imbalance == pytest.approx(2 * 152 / 153) and even.imbalance == 1.0


def test_low_occupancy_takes_more_rounds() -> None:
    """With shared memory for one CTA an SM, the same CTAs take four rounds instead of one."""
    roomy, tight = (one(ctas=152 * 4, smem=s) for s in (0, 200_000))
    assert (roomy.waves, tight.waves) == (1, 4)
    assert tight.occupancy.limited_by == ("shared memory",)
    assert tight.terms_us["latency"] == pytest.approx(4 * roomy.terms_us["latency"])


@pytest.mark.parametrize(("kind", "rate"), [("fp32", 4.0), ("int", 2.0), ("convert", 2.0), ("shuffle", 1.0)])
def test_issue_follows_the_rate_of_the_class(kind: str, rate: float) -> None:
    p = one(instructions={kind: 50_000}, longest={"fp32": 20}, load_bytes=1 * MB)
    assert p.limit == "issue"
    assert p.terms_us["issue"] == pytest.approx(GB300.microseconds(50_000 * 4 / rate))


def test_moves_are_free_and_conflicts_are_not() -> None:
    base = {"instructions": {"load_shared": 20_000}, "load_bytes": 1 * MB}
    with_moves = {**base, "instructions": {"load_shared": 20_000, "move": 90_000}}
    assert us(**base) == us(**with_moves)
    plain = counters(**base)
    conflicted = plain.model_copy(update={"bank_conflicts": 20_000 * 152 * 4})
    a = artifact()
    slow, fast = (predict(a, [c], GB300).launches[0].terms_us["issue"] for c in (conflicted, plain))
    assert slow == pytest.approx(2 * fast)


def test_warm_buffers_do_not_come_from_memory() -> None:
    """Only what weights hold is cold: bytes of an output that is read back come from L2."""
    assert one(load_bytes=4096).hbm_bytes == 0
    assert one(load_bytes=1 * MB).hbm_bytes == 1 * MB - 4096


def test_small_buffers_are_fetched_once_an_sm() -> None:
    """Rereads of a small buffer hit L1; rereads of a large one come through L2."""
    reread = {"load_bytes": 16 * 1024, "sectors": 32 * MB // 32, "ctas": 152 * 8}
    small = one(weight_bytes=16 * 1024, **reread)
    large = one(weight_bytes=64 * MB, **reread)
    assert small.l2_bytes < 4 * MB and large.l2_bytes > 25 * MB
    assert small.us < large.us


def test_uncounted_sectors_are_taken_from_requested_bytes_and_said_so() -> None:
    """A simulator that did not count sectors still gives a memory term, too high rather than too low."""
    full = counters(load_bytes=64 * MB)
    bare = full.model_copy(update={"global_load_sectors": 0, "unique_load_bytes": 0})
    a, b = (predict(artifact(), [c], GB300) for c in (full, bare))
    assert a.us == b.us and b.launches[0].hbm_bytes == 64 * MB - 4096
    assert any("sectors were not counted" in s for s in b.premises.assumptions)
    assert not any("sectors" in s for s in a.premises.assumptions)


def test_chain_adds_gaps_and_pdl_shortens_them() -> None:
    def chain(pdl: bool) -> Prediction:
        return predict(artifact(pdl=pdl, launches=3), [counters()] * 3, GB300)

    pdl, plain = chain(True), chain(False)
    of = GB300.launch_us
    assert [p.gap_us for p in pdl.launches] == [of.first, of.pdl_gap, of.pdl_gap]
    assert plain.us - pdl.us == pytest.approx(2 * (of.gap - of.pdl_gap))
    assert pdl.us == pytest.approx(sum(p.us + p.gap_us for p in pdl.launches))


def test_loads_before_the_wait_hide_behind_the_predecessor() -> None:
    """Only under PDL, and no longer than the gap and the predecessor's idle memory."""
    wait, release = "    griddepcontrol.wait;\n", "    griddepcontrol.launch_dependents;\n"
    early = release + loads(4, together=True) + "\n" + wait
    late = release + wait + loads(4, together=True)

    def second(body: str, **changes: Any) -> Any:
        work = {"ctas": 152, "load_bytes": 2 * MB, "longest": {"load_global": 4, "fp32": 8}}
        made = artifact(body=body, launches=2, **changes)
        return predict(made, [counters(**work)] * 2, GB300).launches[1]

    assert second(early).terms_us["hidden"] > 0.1 and second(late).terms_us["hidden"] == 0
    assert second(early).us < second(late).us - 0.1
    assert second(early, pdl=False).terms_us["hidden"] == 0
    silent = second(early.replace(release, ""))
    assert silent.terms_us["hidden"] <= min(GB300.launch_us.pdl_gap, second(early).terms_us["hidden"])


def test_slower_machine_predicts_longer() -> None:
    h200 = load_machine("h200")

    def ninety(body: str) -> Artifact:
        return artifact(grid=608, body=body).model_copy(update={"arch": "sm_90a"})

    body = loads(8, together=True)
    c = [counters(ctas=608, load_bytes=256 * MB)]
    slow, fast = (
        predict(a, c, m).us for a, m in ((ninety(body), h200), (artifact(grid=608, body=body), GB300))
    )
    assert slow > fast
    with pytest.raises(WorkbenchError, match="sm_103a does not run on h200"):
        predict(artifact(), [counters()], h200)


def test_prediction_states_its_premises_and_explains_itself() -> None:
    p = predict(artifact(), [counters()], GB300)
    assert p.kind == "predicted" and p.premises.machine == "gb300" and p.premises.code == "ptx"
    assert p.premises.machine_hash == GB300.hash and p.premises.assumptions
    exact = predict(artifact(), [counters()], GB300, sass(4, together=True))
    assert exact.premises.code == "sass"
    text = p.explain()
    assert f"{p.us:.2f} us" in text and p.launches[0].limit in text and "warps an SM" in text
    assert Prediction.model_validate_json(p.model_dump_json()) == p


def test_hash_of_the_premises_tells_what_a_value_rests_on() -> None:
    base = predict(artifact(), [counters()], GB300).premises
    assert base.hash == predict(artifact(grid=76), [counters(ctas=76)], GB300).premises.hash
    other = GB300.model_copy(update={"chip": GB300.chip.model_copy(update={"hbm_tb_s": 7.9})})
    changed = [
        predict(artifact(), [counters()], other).premises,
        predict(artifact(), [counters()], GB300, sass(4, together=True)).premises,
        base.model_copy(update={"model_version": base.model_version + 1}),
        base.model_copy(update={"assumptions": base.assumptions[1:]}),
    ]
    assert len({base.hash, *(p.hash for p in changed)}) == 5


def test_kernel_that_cannot_be_launched_is_refused() -> None:
    with pytest.raises(WorkbenchError, match=r"cannot be launched.*registers"):
        predict(artifact(threads=1024, registers=128), [counters()], GB300)


def test_counters_of_another_kernel_are_refused() -> None:
    with pytest.raises(WorkbenchError, match="do not belong"):
        predict(artifact(), [counters().model_copy(update={"kernel": "other"})], GB300)
    with pytest.raises(WorkbenchError, match="do not belong"):
        predict(artifact(), [], GB300)


def test_prediction_is_deterministic() -> None:
    assert predict(artifact(), [counters()], GB300) == predict(artifact(), [counters()], GB300)
