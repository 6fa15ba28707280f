"""Which fences must hold, and what follows where they do not; bubblewrap where it is installed."""

from __future__ import annotations

import os
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from candidates import copy, request

from workbench.compile import FENCES, CompileError, CompileServer, Limits, compile_candidate, policy, sandbox
from workbench.environment import kept
from workbench.report.markdown import sandbox_line

CANARY = "sk-canary-7d1f0a"


def held(*names: str) -> set[str]:
    return set(FENCES) - {"bwrap"} - set(names)


def test_every_required_fence_is_missed_and_others_stand_in() -> None:
    assert policy.lacking(FENCES) == [] == policy.lacking(held())
    assert policy.lacking(held("seccomp")) == ["system calls (seccomp)"]
    assert policy.lacking(held("rlimits")) == ["limits (rlimits)"]
    assert policy.lacking(held("landlock")) == ["files (landlock or bwrap)"]
    assert policy.lacking(held("landlock") | {"bwrap"}) == []
    assert policy.lacking(held("network")) == []  # without sockets there is no network
    assert "network (network or bwrap or seccomp)" in policy.lacking(held("network", "seccomp"))
    assert len(policy.lacking(())) == len(policy.REQUIRED)


@pytest.mark.parametrize(
    "without", [w for n in (1, 2) for w in combinations(("landlock", "seccomp", "rlimits"), n)]
)
def test_nothing_is_compiled_without_a_required_fence(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    with CompileServer(without_fences=(*without, "bwrap")) as server:
        with pytest.raises(CompileError) as caught:
            server.trace(request(copy(build="raise RuntimeError('it ran')")), Limits())
        assert caught.value.kind == "tool" and "\n" not in str(caught.value)
        assert all(name in caught.value.message for name in without)
        assert "--unsafe-compile" in caught.value.message and "it ran" not in caught.value.message
        monkeypatch.setenv(policy.VARIABLE, "1")
        traced = server.trace(request(copy()), Limits())
        assert not set(without) & set(traced.fences)


def test_what_need_not_hold_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    with CompileServer(without_fences=("network", "capabilities", "bwrap")) as server:
        assert set(server.trace(request(copy()), Limits()).fences) == {"landlock", "seccomp", "rlimits"}


def test_the_artifact_says_which_fences_held_and_so_does_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.VARIABLE, "1")
    with CompileServer(without_fences=("seccomp", "bwrap")) as server:
        artifact = compile_candidate(request(copy()), server=server)
    assert artifact.fences is not None and not policy.lacking((*artifact.fences, "seccomp"))
    assert "not fenced in: system calls (seccomp)" in sandbox_line(artifact)
    whole = artifact.model_copy(update={"fences": ("bwrap", "seccomp", "rlimits")})
    assert sandbox_line(whole) == "Compiled in a sandbox; fences that held: bwrap, seccomp, rlimits."
    assert "before the fences" in sandbox_line(artifact.model_copy(update={"fences": None}))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_alone_keeps_files_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.has_bwrap()
    secret = tmp_path / "key"
    secret.write_text(CANARY)
    with CompileServer(without_fences=("landlock", "network")) as server:
        traced = server.trace(request(copy()), Limits())
        assert "bwrap" in traced.fences and "landlock" not in traced.fences
        for build in (
            f"raise RuntimeError(open({str(secret)!r}).read())",
            f"open({str(tmp_path / 'new')!r}, 'w')",
            "import cutlass; open(cutlass.__file__, 'a')",
            "import os; raise RuntimeError(os.listdir(os.path.expanduser('~root')))",
            "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
            "import os; os.kill(1, 9)",
        ):
            with pytest.raises(CompileError) as caught:
                server.trace(request(copy(build=build)), Limits())
            assert caught.value.kind == "user" and CANARY not in str(caught.value) + caught.value.detail
            assert any(
                w in caught.value.message for w in ("Read-only", "No such file", "ermission", "permitted")
            )
        # What a job leaves beside its folder is gone before the next one.
        server.trace(request(copy(build="import os; open(os.environ['HOME'] + '/../left', 'w')")), Limits())
        assert server.root is not None
        assert {p.name for p in server.root.iterdir()} <= {"server.log"}
    assert list(tmp_path.iterdir()) == [secret]


def test_helpers_inherit_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOMETHING"):
        monkeypatch.setenv(name, CANARY)
    assert CANARY not in kept().values() and kept()["PATH"] == os.environ["PATH"]
    with CompileServer() as server:
        server.trace(request(copy()), Limits())
        assert CANARY.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
