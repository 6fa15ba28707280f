"""The desk over the Model Context Protocol: outside agents submit kernels to the same checks.

The tools are those of the conversation loop. Contracts, templates, rule pages and notes are resources too.
An evaluation that takes long sends progress; limits on candidates and wall time hold as in `propose`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
from mcp import types
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from workbench.agent.begin import job_of, settings_of, worker_pool
from workbench.agent.desk import Desk, DeskError, Edit
from workbench.agent.evaluate import Job
from workbench.agent.evaluations import Evaluations
from workbench.agent.model.messages import ToolCall
from workbench.agent.prompts import text
from workbench.agent.run import Candidate, Proposal, RunStore, Status
from workbench.agent.tools import Finish, Submit, answer, parse, specs
from workbench.cost import load_machine, roofline
from workbench.errors import WorkbenchError
from workbench.ops import load_op
from workbench.verify.runs import Level
from workbench.workspace import Workspace

_BEAT = 2.0
"""Seconds between two notes of progress."""
_SCHEME = "workbench"


@dataclass(frozen=True)
class Allowance:
    """What an outside agent may use; None is no limit."""

    candidates: int | None = None
    seconds: float | None = None


@contextmanager
def open_desk(
    workspace: Workspace,
    op_name: str,
    workload_name: str,
    *,
    arch: str = "sm_103a",
    machine: str = "gb300",
    seed: int = 0,
    workers: int | None = None,
) -> Iterator[Desk]:
    """A desk of its own, with workers behind it; what is evaluated is kept as a run's.

    Raises:
        WorkbenchError: for an unknown name.
    """
    settings = settings_of(
        workspace, op_name, workload_name, arch=arch, machine=machine, seed=seed, agent="mcp"
    )
    op = load_op(workspace, op_name)
    workload, described = op.workload(workload_name), load_machine(machine)
    store = RunStore.create(workspace.runs, settings)

    def job(proposal: Proposal, level: Level) -> Job:
        return job_of(workspace, settings, proposal, level, pool.count if level is Level.FULL else 1)

    with (
        store.held(),
        worker_pool(workers) as pool,
        Evaluations(pool, store, job) as evaluations,
    ):
        limit = roofline(op, workload, described)
        yield Desk(workspace, op, workload, settings, limit.us, evaluations)


class DeskServer:
    """Answers MCP requests at one desk.

    Args:
        desk: where the work is done.
        allowance: what may be used.
    """

    def __init__(self, desk: Desk, allowance: Allowance = Allowance()) -> None:
        self._desk, self._allowance = desk, allowance
        self._started = time.monotonic()
        self._submitted = 0
        self.server: Server[dict[str, object]] = Server(
            "workbench",
            instructions=text("system"),
            on_list_tools=self._tools,
            on_call_tool=self._call,
            on_list_resources=self._resources,
            on_read_resource=self._read,
        )

    async def serve(self) -> None:
        """Serve one client over standard input and output until it goes away."""
        async with stdio_server() as (incoming, outgoing):
            await self.server.run(incoming, outgoing, self.server.create_initialization_options())

    async def _tools(
        self, context: ServerRequestContext[dict[str, object]], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(name=t.name, description=t.description, input_schema=t.parameters) for t in specs()
        ]
        return types.ListToolsResult(tools=tools)

    async def _call(
        self, context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            said = await self._answer(context, params)
        except WorkbenchError as e:
            return _text(f"error: {e}", error=True)
        return _text(said)

    async def _answer(
        self, context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
    ) -> str:
        import json

        call = ToolCall(id="", name=params.name, arguments=json.dumps(params.arguments or {}))
        arguments = parse(call)
        match arguments:
            case Submit():
                self._allow()
                edits = tuple(Edit(e.old, e.new) for e in arguments.edits)
                future = self._desk.submit(
                    arguments.source, arguments.base, edits, arguments.knobs, arguments.idea, self._submitted
                )
                self._submitted += 1
                candidate = await self._wait(context, future)
                self._desk.keep(candidate)
                return self._desk.report(candidate)
            case Finish():
                return await anyio.to_thread.run_sync(self._finish)
            case _:
                return await anyio.to_thread.run_sync(answer, self._desk, arguments)

    def _allow(self) -> None:
        if self._allowance.candidates is not None and self._submitted >= self._allowance.candidates:
            raise DeskError(f"all {self._allowance.candidates} candidates that may be submitted are used")
        used = time.monotonic() - self._started
        if self._allowance.seconds is not None and used >= self._allowance.seconds:
            raise DeskError(
                f"the {self._allowance.seconds:g} s in which candidates may be submitted are over"
            )

    def _finish(self) -> str:
        """Put the best candidate through every check and say how it fares."""
        best = self._desk.best()
        if best is None:
            return "no candidate passed every check"
        checked = self._desk.check(best)
        came = {Status.VERIFIED: "passes", Status.LOST: "could not be checked"}.get(checked.status, "fails")
        return f"your best candidate {came}:\n{self._desk.report(checked)}"

    async def _wait(
        self, context: ServerRequestContext[dict[str, object]], future: Future[Candidate]
    ) -> Candidate:
        """Wait for an evaluation; tell a client that asked for it that the work goes on."""
        token = (context.meta or {}).get("progress_token")
        started = beat = time.monotonic()
        while not future.done():
            await anyio.sleep(0.02)
            now = time.monotonic()
            if token is not None and now - beat >= _BEAT:
                beat = now
                await context.session.send_progress_notification(
                    token, now - started, None, "compiling, simulating, checking"
                )
        return future.result()

    # -- resources -------------------------------------------------------------------------------

    def _texts(self) -> dict[str, tuple[str, str]]:
        """URI of each text to what `Desk.read` calls it."""
        workspace, op = self._desk.workspace, self._desk.op.name
        found = {f"{_SCHEME}://contract/{op}": ("contract", "")}
        for name in workspace.template_names(op):
            found[f"{_SCHEME}://template/{op}/{name}"] = ("template", name)
        for path in sorted((workspace.docs / "rules").glob("*.md")):
            found[f"{_SCHEME}://rule/{path.stem}"] = ("rule", path.stem)
        if (workspace.docs / "cute_dsl.md").is_file():
            found[f"{_SCHEME}://notes/cute_dsl"] = ("notes", "cute_dsl")
        return found

    async def _resources(
        self, context: ServerRequestContext[dict[str, object]], params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        listed = [
            types.Resource(uri=uri, name=uri.removeprefix(f"{_SCHEME}://"), mime_type="text/plain")
            for uri in self._texts()
        ]
        return types.ListResourcesResult(resources=listed)

    async def _read(
        self, context: ServerRequestContext[dict[str, object]], params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        texts = self._texts()
        if uri not in texts:
            raise DeskError(f"there is no resource {uri}")
        content = types.TextResourceContents(
            uri=uri, mime_type="text/plain", text=self._desk.read(*texts[uri])
        )
        return types.ReadResourceResult(contents=[content])


def _text(said: str, error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=said)], is_error=error)
