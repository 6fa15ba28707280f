"""Proxy fences: where they may stand, on the PTX and from the cubin alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import audit, contract, only, ptx, rules

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.verify.ordering import audit_file

RULE = "proxy-fence-missing"
FENCE = "fence.proxy.async.shared::cta;\n"
FILL = "shl.b32 %r11, %r1, 1; add.u32 %r12, %r8, %r11; cvt.u16.u32 h, %r1; st.shared.b16 [%r12], h;\n"
COPY = (
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd7], [%r8], 256;\n"
    "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;\n"
)


def kernel(body: str) -> str:
    return ptx("{ .reg .b16 h;\n" + body + "}\n")


def found(folder: Path, body: str) -> tuple[list[str], list[str]]:
    """Rules found with the PTX, and from the cubin alone."""
    text, terms = kernel(body), contract(pdl=False)
    both = rules(audit(folder, text, terms))
    cubin = folder / "alone" / "k.cubin"
    cubin.parent.mkdir(exist_ok=True)
    cubin.write_bytes(assemble(text, "sm_103a", DEFAULT_PTXAS_FLAGS, Limits()).cubin)
    (alone,) = audit_file(cubin, folder / "k.toml").targets
    return both, rules(alone)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (FILL + "bar.sync 0;\n" + COPY, True),
        (FILL + FENCE + "bar.sync 0;\n" + COPY, False),
        (FILL + "bar.sync 0;\n@%p1 " + FENCE + COPY, False),
        (FILL + "@%p1 " + FENCE + "bar.sync 0;\n" + COPY, True),
        (FENCE + FILL + "bar.sync 0;\n" + COPY, True),
        (FILL + "bar.sync 0;\n" + COPY + FENCE, True),
        (FILL + "bar.sync 0;\n@%p1 " + FENCE + "bar.sync 0;\n" + COPY, False),
        (FILL + "fence.proxy.async;\nbar.sync 0;\n" + COPY, False),
        (FILL + "fence.proxy.async.global;\nbar.sync 0;\n" + COPY, True),
        (FILL + "fence.acq_rel.gpu;\nbar.sync 0;\n" + COPY, True),
    ],
)
def test_where_the_fence_stands(tmp_path: Path, body: str, wrong: bool) -> None:
    both, alone = found(tmp_path, body)
    assert (RULE in both) == wrong
    assert (RULE in alone) == wrong


def test_the_finding_names_both_accesses(tmp_path: Path) -> None:
    target = audit(tmp_path, kernel(FILL + "bar.sync 0;\n" + COPY), contract(pdl=False))
    said = only(target, RULE)
    lines = kernel(FILL + "bar.sync 0;\n" + COPY).splitlines()
    store = next(n for n, line in enumerate(lines, 1) if "st.shared.b16" in line)
    copy = next(n for n, line in enumerate(lines, 1) if "cp.async.bulk.global" in line)
    assert said.ptx_line == copy
    assert f"line {store}" in said.message
    assert "fence.proxy.async" in said.fix


def test_other_bytes_need_no_fence(tmp_path: Path) -> None:
    """What is copied was filled by a copy; the store beside it is read by ordinary loads."""
    body = (
        "@%p1 mbarrier.init.shared.b64 [%r8+248], 1; fence.mbarrier_init.release.cluster; bar.sync 0;\n"
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8+248], 64;\n"
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes\n"
        " [%r8], [%rd1], 64, [%r8+248];\n"
        "@%p1 st.shared.b32 [%r8+128], %r1;\n"
        "{ .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r8+248], 0; @!q bra W; }\n"
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd7], [%r8], 64;\n"
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;\n"
    )
    both, alone = found(tmp_path, body)
    assert RULE not in both
    assert RULE not in alone
    touching = body.replace("[%r8+128]", "[%r8+60]")
    both, alone = found(tmp_path, touching)
    assert RULE in both
    assert RULE in alone


def test_a_loop_needs_a_fence_in_every_iteration(tmp_path: Path) -> None:
    loop = (
        "mov.b32 %r13, 0;\nL:\n"
        + FILL
        + "{0}bar.sync 0;\n"
        + COPY
        + "{1}bar.sync 0; add.u32 %r13, %r13, 1;\n"
        "setp.lt.u32 %p5, %r13, 4; @%p5 bra L;\n"
    )
    right, wrong = loop.format(FENCE, ""), loop.format("", FENCE)
    assert RULE not in found(tmp_path, right)[0]
    assert RULE in found(tmp_path, wrong)[0]


EDIT = """
.reg .b64 %map; add.u64 %map, %rd2, 0;
@%p1 tensormap.replace.tile.global_address.global.b1024.b64 [%map], %rd1;
{0}
@%p1 mbarrier.init.shared.b64 [%r8+248], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
{1}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8+248], 128;
@%p1 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
  [%r8], [%map, {%r9}], [%r8+248];
"""
RELEASE = "@%p1 fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "@%p1 fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"


@pytest.mark.parametrize(
    ("release", "acquire", "wrong"),
    [(RELEASE, ACQUIRE, False), (RELEASE, "", True), ("", ACQUIRE, True), ("", "", True)],
)
def test_an_edited_tensor_map(tmp_path: Path, release: str, acquire: str, wrong: bool) -> None:
    body = EDIT.replace("{0}", release).replace("{1}", acquire)
    target = audit(tmp_path, ptx(body), contract(pdl=False, w="scratch"))
    assert (RULE in rules(target)) == wrong
