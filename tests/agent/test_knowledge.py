"""The notes that agents read: every example compiles in the sandbox and does what is said of it.

A block without a kernel of its own is put into the frame, the first block. Its last comments are claims:
`PTX has`, `PTX lacks`, `audit` (the rule that must find an error), `simulator` (the same of a run), `refused`
(words of the compiler's message). A block without the last three must pass the audit and run without finding.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from workbench.agent.model import Profile
from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileError, CompileRequest, CompileServer, compile_candidate
from workbench.findings import Finding, Severity
from workbench.isa.sass import disassemble, parse_sass
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.simulator import Memory, simulate
from workbench.verify.ordering import audit
from workbench.verify.report import Verdict

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cute_dsl.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
_CLAIM = re.compile(r"^# (PTX has|PTX lacks|audit|simulator|refused): (.+)$", re.MULTILINE)
FRAME = BLOCKS[0]
BUFFERS = (
    BoundBuffer(name="x", shape=(8, 1024), dtype=DType.BF16, role=Role.ACTIVATION),
    BoundBuffer(name="w", shape=(8, 1024), dtype=DType.BF16, role=Role.WEIGHT),
    BoundBuffer(name="flag", shape=(8,), dtype=DType.I32, role=Role.FLAG, zeroed=True),
    BoundBuffer(name="out", shape=(8, 1024), dtype=DType.F32, role=Role.OUTPUT),
)


def source_of(block: str) -> str:
    """The block as a whole file."""
    preamble = FRAME[: FRAME.index("@cute.kernel")]
    if block == FRAME:
        return block
    if "def build(" in block:
        return preamble + block
    before, _, rest = FRAME.partition("    # body\n")
    _, end, after = rest.partition("    # end\n")
    lines = block.splitlines(keepends=True)
    outside = ""
    if lines[0].startswith("def "):  # a helper goes before the kernel
        body = next(n for n, line in enumerate(lines[1:], 1) if line[0] not in " \n#})")
        outside, lines = "".join(lines[:body]), lines[body:]
    inside = "".join(f"    {line}" if line.strip() else line for line in lines)
    return before.replace(preamble, preamble + outside) + inside + end + after


def request_of(block: str) -> CompileRequest:
    source = source_of(block)
    used = re.search(r"def host\((.*)stream\):", source)
    assert used is not None
    return CompileRequest(
        op="notes", workload="notes", axes={}, template="notes", knobs={}, arch="sm_103a", source=source,
        buffers=tuple(b for b in BUFFERS if f"{b.name}:" in used[1]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s


def run(artifact: Artifact) -> list[Finding]:
    """Findings of two launches; they must come to their ends."""
    memory = Memory(1 << 26)
    rng = np.random.default_rng(1)
    for b in artifact.buffers:
        count = int(np.prod(b.shape)) * b.dtype.bits // 8
        given = memory.allocate(b.name, count, align=256, initialized=b.role is not Role.OUTPUT)
        if b.dtype is DType.BF16:
            given.view(ml_dtypes.bfloat16)[:] = rng.normal(size=count // 2)
    errors: list[Finding] = []
    for _ in range(2):  # nobody resets flags between two launches
        outcome = simulate(artifact, memory)
        errors += [f for f in outcome.findings if f.severity is Severity.ERROR]
        assert outcome.completed or errors
        if any(b.role is Role.FLAG for b in artifact.buffers):
            assert not memory.view("flag").any()
    return errors


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_example_does_what_the_page_says(server: CompileServer, number: int) -> None:
    block = BLOCKS[number]
    claims = _CLAIM.findall(block)
    assert claims, "an example without a claim"
    said = dict(claims)
    if "refused" in said:
        with pytest.raises(CompileError, match=f"(?i){re.escape(said['refused'])}"):
            compile_candidate(request_of(block), server=server)
        return
    artifact = compile_candidate(request_of(block), server=server)
    ptx = " ".join(artifact.ptx.split())
    for kind, text in claims:
        if kind.startswith("PTX"):
            assert (text in ptx) == (kind == "PTX has"), text
    check = audit(artifact, parse_sass(disassemble(artifact.cubin)))
    found = {f.rule for f in check.findings if f.severity is Severity.ERROR}
    if "audit" in said:
        assert said["audit"] in found, check
    else:
        assert not found and check.verdict is not Verdict.FAIL, check
    errors = run(artifact)
    if "simulator" in said:
        assert said["simulator"] in {f.rule for f in errors}
    elif "audit" not in said:
        assert not errors and check.verdict is Verdict.PASS, (errors, check)


def test_every_rule_that_is_named_has_a_page() -> None:
    rules = {p.stem for p in (DOCS / "rules").glob("*.md")}
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", PAGE))
    assert named <= rules, named - rules
    ordering = {"pdl-wait-missing", "pdl-load-before-wait", "flag-without-release", "flag-without-acquire"}
    assert ordering <= named


def test_every_link_leads_somewhere() -> None:
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([a-z-]+)\)", PAGE)) == headings


# -- the page on agents ------------------------------------------------------------------------------

AGENTS = (DOCS / "agents.md").read_text()


def test_the_profile_and_the_configuration_on_the_page_can_be_used() -> None:
    (profile,) = re.findall(r"^```toml\n(.*?)^```$", AGENTS, re.MULTILINE | re.DOTALL)
    assert Profile.model_validate(tomllib.loads(profile)).price is not None
    assert all(name in profile for name in Profile.model_fields)
    (configuration,) = re.findall(r"^```json\n(.*?)^```$", AGENTS, re.MULTILINE | re.DOTALL)
    given = json.loads(configuration)["mcpServers"]["workbench"]["args"]
    assert {x for x in given if x.startswith("--")} <= options("mcp")


@pytest.mark.parametrize("page", ["agents.md", "commands.md"])
def test_the_pages_name_the_options_that_there_are(page: str) -> None:
    text = (DOCS / page).read_text()
    if page == "commands.md":
        text = text[text.index("## Options of `propose`") : text.index("## What `audit` takes")]
        assert options("propose") - {"--help", "--op", "--workload", *COMMON} <= named(text)
    assert named(text) <= options("propose") | options("mcp")


COMMON = ("--json", "--quiet", "-q", "--debug")


def named(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def options(command: str) -> set[str]:
    from typer.main import get_command

    from workbench.cli.app import app

    (found,) = [c for n, c in get_command(app).commands.items() if n == command]  # type: ignore[attr-defined]
    return {x for p in found.params for x in p.opts} | {"--help"}
