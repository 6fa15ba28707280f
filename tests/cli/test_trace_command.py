"""`workbench verify --trace` and the dump after a failed verification."""

from __future__ import annotations

from typing import Any

from workbench.workspace import Workspace

KERNEL = ("row", "--op", "rmsnorm", "--workload", "small_b1")


def test_a_thread_is_traced(run: Any, workspace: Workspace) -> None:
    result = run("verify", *KERNEL, "--trace", "thread=0:1", "--json")
    document = result.json("trace")
    assert result.code == 0
    steps = document["trace"]["steps"]
    assert {s["thread"] for s in steps} == {"cta=(0,0,0) thread=(1,0,0)"}
    assert len(steps) == document["trace"]["total"] > 20
    tid = next(s for s in steps if "%tid.x" in s["text"])
    assert list(tid["writes"].values()) == ["0x00000001 1"]
    assert document["findings"] == []
    text = run("verify", *KERNEL, "--trace", "thread=0:1").out
    assert "griddepcontrol.wait" in text and "candidate.py:" in text


def test_an_address_is_traced(run: Any, workspace: Workspace) -> None:
    document = run("verify", *KERNEL, "--trace", "address=out+4", "--json").json("trace")
    (store,) = document["trace"]["steps"]
    assert store["text"].startswith("st.global") and store["before"] != store["after"]


def test_what_cannot_be_traced_is_refused(run: Any, workspace: Workspace) -> None:
    for what, complaint in (
        ("warp=3", "thread=CTA:THREAD"),
        ("address=outt", "nearest: out"),
        ("address=out+999999", "there is no byte"),
    ):
        result = run("verify", *KERNEL, "--trace", what)
        assert result.code == 2 and complaint in result.err


def test_a_failed_verification_shows_the_thread(run: Any, workspace: Workspace) -> None:
    text = (workspace.templates / "rmsnorm" / "row.py").read_text()
    right = "row = cutlass.min(block * self.rows + r, self.tokens - 1)"
    assert right in text
    path = workspace.root / "far.py"
    path.write_text(text.replace(right, "row = block * self.rows + r + 4096"))
    result = run("verify", str(path), "--op", "rmsnorm", "--workload", "small_b1", "--level", "screen")
    assert result.code == 1
    assert "out-of-bounds at PTX line" in result.out and "registers" in result.out
    traced = run(
        "verify", str(path), "--op", "rmsnorm", "--workload", "small_b1", "--trace", "thread=0:0", "--json"
    )
    assert traced.code == 1
    assert traced.json("trace")["trace"]["dumps"][0]["rule"] == "out-of-bounds"
