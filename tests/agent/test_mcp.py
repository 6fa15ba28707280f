"""The desk over MCP, spoken to by the official SDK's client in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import MCPError, StdioServerParameters
from mcp.client import Client
from small_workspace import make_workspace
from watch import Watch

CANARY = "sk-canary-31c5feed"
HOSTILE = Path(__file__).parent / "hostile"
WORKBENCH = str(Path(sys.executable).with_name("workbench"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path / "space", docs=True).root


def server(workspace: Path, *options: str) -> StdioServerParameters:
    arguments = ["mcp", "--op", "rmsnorm", "--workload", "small_b1", "--workers", "1"]
    return StdioServerParameters(
        command=WORKBENCH,
        args=[*arguments, *options],
        env={"WORKBENCH_ROOT": str(workspace), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
    )


def said(result: Any) -> str:
    return "".join(part.text for part in result.content)


def test_a_wrong_and_a_right_candidate_and_both_reports(workspace: Path) -> None:
    progress: list[float] = []

    async def note(value: float, total: float | None, message: str | None) -> None:
        progress.append(value)

    async def talk() -> None:
        async with Client(server(workspace, "--max-candidates", "2")) as client:
            tools = {t.name: t for t in (await client.list_tools()).tools}
            assert {"read", "submit", "read_report", "compare", "what_bounds", "finish"} <= tools.keys()
            assert "source" in tools["submit"].input_schema["properties"]
            uris = [str(r.uri) for r in (await client.list_resources()).resources]
            assert "workbench://contract/rmsnorm" in uris and "workbench://template/rmsnorm/row" in uris
            template = await client.read_resource("workbench://template/rmsnorm/row")
            source = template.contents[0].text
            wrong = source.replace("        cute.arch.griddepcontrol_wait()\n", "", 1)
            assert wrong != source
            result = await client.call_tool("submit", {"source": wrong}, progress_callback=note)
            assert not result.is_error and "REFUSED" in said(result) and "pdl-wait-missing" in said(result)
            wait = "        cute.arch.griddepcontrol_launch_dependents()\n"
            edit = {"old": wait, "new": f"        cute.arch.griddepcontrol_wait()\n{wait}"}
            result = await client.call_tool("submit", {"base": "c0-0", "edits": [edit]})
            assert "VERIFIED" in said(result) and "predicted" in said(result)
            assert "REFUSED" in said(await client.call_tool("read_report", {"candidate": "c0-0"}))
            assert "VERIFIED" in said(await client.call_tool("read_report", {"candidate": "c0-1"}))
            refused = await client.call_tool("submit", {"base": "row"})
            assert refused.is_error and "all 2 candidates" in said(refused)
            bad = await client.call_tool("submit", {"sauce": "x"})
            assert bad.is_error and "sauce" in said(bad)
            assert "passes" in said(await client.call_tool("finish", {}))

    anyio.run(talk)
    assert progress == sorted(progress)


def test_a_key_in_the_environment_is_nowhere_else(workspace: Path, tmp_path: Path) -> None:
    """Of the server alone: no reply, file, log, message or child has it, whatever a client submits."""
    variables = ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WORKBENCH_KEY")
    errors, temporary = tmp_path / "errors.txt", tmp_path / "temporary"
    temporary.mkdir()
    plain = server(workspace)
    assert plain.env is not None
    with_key = StdioServerParameters(
        command="sh",
        args=["-c", f'exec "$0" "$@" 2> {errors}', plain.command, *plain.args],
        env={**plain.env, **dict.fromkeys(variables, CANARY), "TMPDIR": str(temporary)},
    )
    replies: list[str] = []

    async def talk() -> None:
        async with Client(with_key) as client:

            async def ask(tool: str, **arguments: Any) -> str:
                replies.append(said(await client.call_tool(tool, arguments)))
                return replies[-1]

            replies.append(str(await client.list_tools()) + str(await client.list_resources()))
            for name in ("read_environment", "read_parents_environment", "format_walk"):
                assert "FAILED" in await ask("submit", source=(HOSTILE / f"{name}.py").read_text())
            assert "VERIFIED" in await ask("submit", base="row")
            for tool, arguments in (
                ("no_such_tool", {}),
                ("read", {"what": "notes", "name": "/proc/self/environ"}),
                ("read", {"what": "template", "name": "$OPENAI_API_KEY"}),
                ("compare", {"first": "c0-0", "second": "c0-3"}),
                ("what_bounds", {"candidate": "c0-3"}),
                ("submit", {"base": "row", "idea": "$HF_TOKEN ${HF_TOKEN} {HF_TOKEN}"}),
                ("finish", {"summary": "$OPENAI_API_KEY"}),
            ):
                await ask(tool, **arguments)
            for uri in ("workbench://template/rmsnorm/row", "file:///proc/self/environ"):
                try:
                    replies.append(str(await client.read_resource(uri)))
                except MCPError as e:
                    replies.append(str(e))

    with Watch(CANARY, spared=("workbench\0mcp",)) as watch:
        anyio.run(talk)
    assert len(watch.looked) >= 2 and not watch.seen  # a worker and its compile server at least
    assert len(replies) == 14 and not any(CANARY in reply for reply in replies)
    files = [p for root in (workspace, temporary) for p in root.rglob("*") if p.is_file()]
    assert any(p.suffix == ".json" for p in files)
    for path in (*files, errors):
        assert CANARY.encode() not in path.read_bytes(), path


def test_an_unknown_op_is_one_line(workspace: Path) -> None:
    import subprocess

    child = subprocess.run(
        [WORKBENCH, "mcp", "--op", "nothing"],
        capture_output=True,
        text=True,
        env={**os.environ, "WORKBENCH_ROOT": str(workspace)},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert child.returncode == 2 and child.stdout == "" and "unknown op 'nothing'" in child.stderr
