"""Loads outside the memory model, from the cubin alone: every case that ptxas was seen to move."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import STORE, contract, ptx

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.findings import Severity
from workbench.verify.ordering import AuditTarget, audit_file
from workbench.verify.report import Verdict

RULE = "nc-load-of-mutable"
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
MINE = "ld.global.f32 %f4, [%rd6]; st.global.f32 [%rd5], %f4; "
"""Each thread writes its element of x."""
CASES = {
    "behind a barrier": (MINE + "bar.sync 0; ld.global{nc}.f32 %f1, [%rd8];", False),
    "behind an elected wait": (
        "@!%p2 bra L; griddepcontrol.wait;\nL: bar.sync 0; ld.global{nc}.f32 %f1, [%rd5];",
        True,
    ),
    "behind a poll by thread 0": (
        "@!%p1 bra L;\nP: ld.acquire.gpu.global.b32 %r6, [%rd3]; setp.eq.s32 %p4, %r6, 0; @%p4 bra P;\n"
        "L: bar.sync 0; ld.global{nc}.f32 %f1, [%rd5];",
        False,
    ),
    "behind a cluster barrier": (
        MINE + "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "
        "ld.global{nc}.f32 %f1, [%rd8];",
        False,
    ),
}
OTHER = "xor.b32 %r7, %r4, 1; mul.wide.s32 %rd9, %r7, 4; add.s64 %rd8, %rd1, %rd9; "


def alone(folder: Path, name: str, nc: str, arch: str) -> AuditTarget:
    body, pdl = CASES[name]
    flag = "poll" in name
    store = STORE.replace("%rd7", "%rd6" if flag else "%rd7")
    text = ptx(OTHER + body.replace("{nc}", nc) + store, arch=arch)
    if "cluster" in name:
        size = ".reqntid 128,1,1\n"
        text = text.replace(size, size + ".explicitcluster\n.reqnctapercluster 2, 1, 1\n")
    text = text.replace(".version 8.4", ".version 8.6")  # sm_100a
    path = folder / "k.cubin"
    path.write_bytes(assemble(text, arch, DEFAULT_PTXAS_FLAGS, Limits()).cubin)
    roles = {"x": "mailbox", "w": "output", "out": "flag"} if flag else {"x": "scratch"}
    if pdl:
        roles = {}
    terms = contract(pdl=pdl, **roles)
    if "cluster" in name:
        terms = terms.replace("block = [128, 1, 1]\n", "block = [128, 1, 1]\ncluster = [2, 1, 1]\n")
    (folder / "k.toml").write_text(terms)
    (target,) = audit_file(path, folder / "k.toml").targets
    return target


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_the_cubin_alone_shows_it(tmp_path: Path, name: str, arch: str) -> None:
    wrong = alone(tmp_path, name, ".nc", arch)
    hits = [f for f in wrong.findings if f.rule == RULE and f.severity is Severity.ERROR]
    said = [(f.rule, f.severity.value, f.message) for f in wrong.findings]
    assert hits and all(f.sass_offset is not None for f in hits), said
    assert wrong.verdict is Verdict.FAIL


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_with_an_ordinary_load_passes(tmp_path: Path, name: str, arch: str) -> None:
    right = alone(tmp_path, name, "", arch)
    assert right.verdict is Verdict.PASS, [(f.rule, f.severity.value, f.message) for f in right.findings]
