"""Flags, scopes, clusters and residence: the static rules alone, on the PTX and on the cubin alone."""

from __future__ import annotations

import pytest
from pairing import PAIRS
from snippets import ptx

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.findings import Finding, Severity
from workbench.isa.cubin import read_cubin
from workbench.isa.ptx import parse
from workbench.isa.sass import disassemble, parse_sass
from workbench.ops.model import Role
from workbench.verify.contract import load_contract
from workbench.verify.ordering import rules
from workbench.verify.ordering.binding import Launch
from workbench.verify.ordering.dependence import polls
from workbench.verify.ordering.memory import Scope, Space, fences, touches
from workbench.verify.ordering.protocol import Protocols
from workbench.verify.ordering.rules.residency import resident
from workbench.verify.ordering.rules.trigger import early_triggers
from workbench.verify.ordering.static import analyse_forms, contract_launch, kernel_forms
from workbench.verify.ordering.view import PtxView, SassView

STATIC = {
    "flag-without-acquire": (
        "atomic_poll",
        "last_cta_of_split_k",
        "poll_by_one_thread",
        "release_fence_is_no_acquire",
        "ticket_with_release_only",
        "volatile_poll_without_fence",
    ),
    "flag-without-release": (
        "acquire_fence_is_no_release",
        "fence_by_one_thread_before_the_barrier",
        "nobody_waits_for_the_others",
        "relaxed_store_after_barrier",
        "ticket_with_acquire_only",
        "volatile_store_is_no_release",
        "weak_flag_store",
    ),
    "scope-too-narrow": (
        "acquire_for_the_cta_only",
        "fence_for_the_cta_only",
        "gpu_scope_towards_a_peer",
        "membar_cta_after_the_poll",
        "release_for_the_cta_only",
        "remote_arrive_for_the_cta",
        "ticket_counted_for_the_cta",
        "ticket_for_the_cluster",
        "unqualified_remote_arrive",
        "wait_for_the_cta_only",
    ),
    "elected-arrive": ("elect_sync_is_no_barrier", "lane_zero_for_its_warp", "shuffle_is_no_barrier"),
    "cluster-barrier": (
        "arrives_twice",
        "no_barrier_behind_the_last_read",
        "relaxed_arrival_after_a_remote_store",
        "relaxed_arrival_before_a_remote_read",
        "waits_without_arriving",
    ),
    "multimem-order": (
        "fence_for_one_gpu",
        "flag_behind_relaxed_data",
        "ordinary_load_of_a_multicast_address",
        "ordinary_store_to_a_multicast_address",
    ),
    "not-co-resident": (
        "a_stage_too_many",
        "barrier_of_a_grid_with_much_shared_memory",
        "one_cta_a_multiprocessor",
    ),
    "persistent-device-state": (
        "accumulator_in_the_module",
        "call_counter",
        "result_kept_from_the_first_call",
    ),
}
NOT_IN_SASS = {
    "ticket_for_the_cluster": "SASS has .gpu for .cluster",
    "wait_for_the_cta_only": "the wait's CCTL is looked for on the PTX",
    "arrives_twice": "SASS goes around the barrier where the cluster is one CTA",
    "waits_without_arriving": "the same",
    "no_barrier_behind_the_last_read": "the same",
}
CASES = [pytest.param(r, n, id=f"{r}-{n}") for r, names in STATIC.items() for n in names]
ON_SASS = [
    c
    for c in CASES
    if c.values[0] in ("flag-without-acquire", "flag-without-release", "scope-too-narrow", "cluster-barrier")
    and c.values[1] not in NOT_IN_SASS
]


def ptx_view(rule: str, name: str, side: str) -> PtxView:
    text = (PAIRS / rule / f"{name}.{side}.ptx").read_text()
    module = parse(text)
    contract = load_contract(PAIRS / rule / f"{name}.toml")
    kernel = module.kernels[0].name
    forms = kernel_forms(module, None, None, kernel, None)
    view = analyse_forms(forms, contract_launch(forms, contract.find(kernel, 1))).ptx
    assert view is not None
    return view


def sass_view(rule: str, name: str, side: str) -> SassView:
    text = (PAIRS / rule / f"{name}.{side}.ptx").read_text()
    cubin = assemble(text, "sm_103a", DEFAULT_PTXAS_FLAGS, Limits()).cubin
    contract = load_contract(PAIRS / rule / f"{name}.toml")
    sass = parse_sass(disassemble(cubin))
    kernel = sass.functions[0].name
    forms = kernel_forms(None, sass, read_cubin(cubin), kernel, None)
    view = analyse_forms(forms, contract_launch(forms, contract.find(kernel, 1))).sass
    assert view is not None
    return view


def errors(found: list[Finding]) -> list[str]:
    return [f.rule for f in found if f.severity is not Severity.INFO]


@pytest.mark.parametrize(("rule", "name"), CASES)
def test_the_ptx_alone_shows_it(rule: str, name: str) -> None:
    found = rules.apply(ptx_view(rule, name, "wrong"), None)
    assert rule in errors(found), [(f.rule, f.message) for f in found]
    assert all(f.ptx_line is not None and f.fix for f in found)
    right = rules.apply(ptx_view(rule, name, "right"), None)
    assert right == [], [(f.rule, f.message) for f in right]


@pytest.mark.parametrize(("rule", "name"), ON_SASS)
def test_the_cubin_alone_shows_it(rule: str, name: str) -> None:
    found = rules.apply(None, sass_view(rule, name, "wrong"))
    assert rule in errors(found), [(f.rule, f.message) for f in found]
    right = rules.apply(None, sass_view(rule, name, "right"))
    assert right == [], [(f.rule, f.message) for f in right]


def bare(body: str, grid: tuple[int, int, int] | None = None, **roles: Role) -> PtxView:
    """A snippet whose parameters are buffers named by their index: `parameter 0` and so on."""
    module = parse(ptx(body))
    forms = kernel_forms(module, None, None, "k", None)
    launch = contract_launch(forms, None)
    named = {f"parameter {n[1:]}": r for n, r in roles.items()}
    launch = Launch(launch.kernel, launch.block, launch.params, named, False, launch.literal, grid=grid)
    view = analyse_forms(forms, launch).ptx
    assert view is not None
    return view


LAMPORT = (
    "L:\nld.volatile.global.v2.b32 {%r10, %r11}, [%rd5]; setp.eq.s32 %p5, %r10, -1; "
    "setp.eq.s32 %p6, %r11, -1; or.pred %p5, %p5, %p6; @%p5 bra L; "
    "mov.b32 %f1, %r10; mov.b32 %f2, %r11; add.f32 %f3, %f1, %f2; "
)


def test_polled_data_needs_no_acquire() -> None:
    view = bare(LAMPORT + "st.global.f32 [%rd7], %f3; ld.global.f32 %f2, [%rd7];", p0=Role.MAILBOX)
    (poll,) = polls(view)
    assert poll.data
    assert rules.apply(view, None) == []


def test_a_loop_over_data_is_no_poll() -> None:
    view = bare(
        "L:\nld.global.f32 %f1, [%rd5]; add.s64 %rd5, %rd5, 4; setp.gt.f32 %p5, %f1, 0f00000000; "
        "@%p5 bra L; "
        "st.global.f32 [%rd7], %f1;"
    )
    assert polls(view) == ()


def test_a_counter_that_hands_out_work_is_no_flag() -> None:
    view = bare(
        "L:\nst.global.f32 [%rd7], 0f00000000; atom.relaxed.gpu.global.add.u32 %r10, [%rd1], 1; "
        "setp.ge.u32 %p5, %r10, %r9; @%p5 bra E; mul.wide.u32 %rd8, %r10, 4; add.s64 %rd8, %rd8, %rd3; "
        "ld.global.f32 %f1, [%rd8]; st.global.f32 [%rd8], %f1; bra L;\nE:\n",
        (8, 1, 1),
        p0=Role.FLAG,
        p2=Role.STATE,
    )
    assert Protocols.of(view).tickets == ()
    assert rules.apply(view, None) == []


def test_a_flag_set_back_publishes_nothing_unless_it_is_a_lock() -> None:
    use = "ld.global.f32 %f1, [%rd7]; st.global.f32 [%rd7], %f1; bar.sync 0; "
    back = "@%p1 st.relaxed.gpu.global.u32 [%rd1], 0;"
    for test, found in (("setp.ne", ["flag-without-release"]), ("setp.eq", [])):
        poll = f"L:\nld.acquire.gpu.global.u32 %r10, [%rd1]; {test}.u32 %p5, %r10, 0; @%p5 bra L; "
        view = bare(poll + use + back, (8, 1, 1), p0=Role.FLAG, p2=Role.STATE)
        assert [f.rule for f in rules.apply(view, None)] == found


def test_scopes_that_are_needed() -> None:
    body = "st.relaxed.gpu.global.u32 [%rd1], 1;"
    flag = frozenset(("parameter 0",))
    assert Protocols.of(bare(body)).needed_scope(flag) is None
    assert Protocols.of(bare(body, (1, 1, 1))).needed_scope(flag) is Scope.CTA
    assert Protocols.of(bare(body, (4, 1, 1))).needed_scope(flag) is Scope.GPU
    assert Protocols.of(bare(body, (1, 1, 1), p0=Role.MAILBOX)).needed_scope(flag) is Scope.SYS


def test_accesses_as_they_are_written() -> None:
    view = bare(
        "st.release.sys.global.u32 [%rd5], 1; ld.volatile.global.u32 %r10, [%rd5]; "
        "mapa.shared::cluster.u32 %r11, %r8, 1; st.shared::cluster.b32 [%r11], %r10; "
        "st.shared.b32 [%r8], %r10; "
        "atom.global.add.u32 %r12, [%rd5], 1; fence.acq_rel.cluster; membar.gl; fence.proxy.async; "
        "cp.async.ca.shared.global [%r8], [%rd6], 4;"
    )
    found = [t for t in touches(view) if t.space is not Space.OTHER]
    assert [t.space for t in found] == [
        Space.GLOBAL,
        Space.GLOBAL,
        Space.REMOTE,
        Space.SHARED,
        Space.GLOBAL,
        Space.GLOBAL,
    ]
    assert [t.scope for t in found] == [Scope.SYS, Scope.SYS, None, None, Scope.GPU, None]
    assert [t.releases for t in found] == [True, False, False, False, False, False]
    assert found[5].names == {"parameter 1"}
    assert [f.scope for f in fences(view)] == [Scope.CLUSTER, Scope.GPU]


def test_ctas_that_fit() -> None:
    assert resident(bare(""), None) == 160 * 16
    assert resident(bare(""), 128) == 160 * 4
    assert resident(bare(""), 255) == 160 * 2


TRIGGER, STORE = "griddepcontrol.launch_dependents;", "st.global.f32 [%rd7], 0f00000000;"


@pytest.mark.parametrize(
    ("producer", "consumer", "found"),
    [
        (TRIGGER + STORE, "ld.global.f32 %f1, [%rd5];", ["pdl-early-trigger"]),
        (STORE + TRIGGER, "ld.global.f32 %f1, [%rd5];", []),
        (TRIGGER + STORE, "griddepcontrol.wait; ld.global.f32 %f1, [%rd5];", []),
        (TRIGGER + STORE, "ld.global.f32 %f1, [%rd6];", []),
    ],
)
def test_early_triggers(producer: str, consumer: str, found: list[str]) -> None:
    views: list[PtxView | SassView | None] = []
    launches: list[Launch] = []
    for body, names in ((producer, ("a", "b", "y")), (consumer, ("y", "w", "out"))):
        module = parse(ptx(body))
        forms = kernel_forms(module, None, None, "k", None)
        base = contract_launch(forms, None)
        params = {
            n: p.model_copy(
                update={"relocations": (p.relocations[0].model_copy(update={"buffer": names[n]}),)}
            )
            for n, p in base.params.items()
        }
        launches.append(Launch("k", base.block, params, {}, True, base.literal))
        views.append(analyse_forms(forms, launches[-1]).ptx)
    assert [f.rule for f in early_triggers(launches, views, 0)] == found
    assert early_triggers(launches, views, 1) == []


@pytest.mark.parametrize("name", ["a_stage_too_many"])
def test_the_cubin_tells_its_static_shared_memory(name: str) -> None:
    found = rules.apply(None, sass_view("not-co-resident", name, "wrong"))
    assert "not-co-resident" in errors(found), [(f.rule, f.message) for f in found]
    assert rules.apply(None, sass_view("not-co-resident", name, "right")) == []
