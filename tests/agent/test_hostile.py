"""Hostile candidates (the files of `hostile/`): each is refused by name, and costs nothing but its own trial.

The first line of a file says what it tries and why it is refused; `|` between reasons means any of them. Each
goes through what `verify` does and through what `propose` does with it. Where a second line says so it also
goes past the screen, into the sandbox alone, as a trick that the screen does not know would.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_server import Answer, serve
from watch import Watch

from workbench import api
from workbench.agent import begin, online
from workbench.agent.evaluate import Evaluator, Job
from workbench.agent.model import Profile
from workbench.agent.online import Plan
from workbench.agent.run import Proposal, Status
from workbench.compile import (
    ArtifactCache,
    CompileError,
    CompileRequest,
    CompileServer,
    Limits,
    compile_candidate,
    default_server,
    find_ptxas,
)
from workbench.errors import WorkbenchError
from workbench.findings import Severity
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.templates import load_template
from workbench.verify.report import Report, Verdict
from workbench.verify.verify import Level, verify_artifact
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "hostile"
ESCAPED = Path("/tmp/workbench-hostile-escape")
WORKLOAD = "small_b1"
CANARY = "sk-canary-0b5e55ed"
AMPLE = Limits(seconds=30, memory_bytes=1 << 30, file_bytes=4 << 20)
BRIEF = AMPLE.model_copy(update={"seconds": 2.0})
RUN_SECONDS = 2.0
_HEAD = re.compile(r"# (?P<kind>\w+): (?P<tries>.+?) \| refused: (?P<reasons>.+)")
_PAST = re.compile(r"^# past the screen: (?P<reasons>.+)$", re.M)


def head(path: Path) -> re.Match[str]:
    found = _HEAD.search(path.read_text())
    assert found is not None, f"{path.name} does not say what it tries and why it is refused"
    return found


FILES = sorted(FOLDER.glob("*.py"))
HOSTILE = [p for p in FILES if head(p)["reasons"] != "nothing"]
PAST = [p for p in FILES if _PAST.search(p.read_text())]


def limits(reasons: str) -> Limits:
    return BRIEF if "timeout" in reasons else AMPLE


def check(wanted: str, got: str) -> None:
    assert any(reason in got for reason in wanted.split("|")), f"wanted {wanted}; got {got}"


def reasons_of(report: Report) -> str:
    assert report.verdict is Verdict.FAIL
    failed = [c for c in report.checks if c.verdict is Verdict.FAIL]
    rules = {f.rule for c in failed for f in c.findings if f.severity is Severity.ERROR}
    return ", ".join([*sorted(rules), *(c.name for c in failed)])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("hostile")
    for folder in ("verifiers", "templates"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("generated_kernels", "tuning_db"):
        (root / folder).mkdir()
    return Workspace(root)


@pytest.fixture(scope="module")
def op(workspace: Workspace) -> Op:
    return load_op(workspace, "rmsnorm")


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator()


def fingerprint() -> object:
    """What a candidate must not change of the machine."""
    judge = hashlib.sha256((ROOT / "workbench" / "ops" / "compare.py").read_bytes()).hexdigest()
    ptxas = find_ptxas().stat()
    home = sorted(p.name for p in Path.home().iterdir())
    variables = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return judge, ptxas.st_mtime_ns, ptxas.st_size, home, variables, ESCAPED.exists()


def processes_of(server: CompileServer) -> list[int]:
    """Processes with the server's environment: itself, its jobs and whatever those left behind."""
    mark = f"HOME={server.root}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def served(server: CompileServer) -> int:
    """How many processes a server is: itself, and under bubblewrap the two around it."""
    around = Path(f"/proc/{server.pid}/comm").read_text().strip() == "bwrap"
    return 3 if around else 1


@pytest.fixture(autouse=True)
def unharmed() -> Iterator[None]:
    before = fingerprint()
    threads = threading.active_count()
    yield
    assert fingerprint() == before
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a cancelled timer takes a moment to end
    assert threading.active_count() <= threads
    server = default_server()
    if server.pid is not None:
        assert len(processes_of(server)) == served(server)
        assert server.root is not None and not list(server.root.glob("job-*"))


def test_there_are_enough_of_them_and_all_kinds() -> None:
    assert len(HOSTILE) >= 45
    kinds = {head(p)["kind"] for p in HOSTILE}
    assert kinds >= {f"H{n}" for n in range(1, 24)} | {"C08", "C09", "C12", "C34", "C35", "escape"}


@pytest.mark.parametrize("path", HOSTILE, ids=lambda p: p.stem)
def test_verify_refuses(path: Path, workspace: Workspace, op: Op) -> None:
    wanted = head(path)["reasons"]
    try:
        template = load_template(path)
        request = CompileRequest.of(op, WORKLOAD, template, template.default)
        artifact = compile_candidate(request, ArtifactCache(workspace.cache), limits(wanted))
    except WorkbenchError as e:
        check(wanted, str(e))
        return
    cache = ArtifactCache(workspace.cache)
    verification = verify_artifact(artifact, op, level=Level.FULL, cache=cache, time_limit=RUN_SECONDS)
    check(wanted, reasons_of(verification.report))


@pytest.mark.parametrize("path", HOSTILE, ids=lambda p: p.stem)
def test_propose_refuses(path: Path, workspace: Workspace, evaluator: Evaluator) -> None:
    wanted = head(path)["reasons"]
    try:
        knobs = load_template(path).default
    except WorkbenchError:
        knobs = {}
    outcome = evaluator(
        Job(
            workspace=workspace.root,
            op="rmsnorm",
            workload=WORKLOAD,
            arch="sm_103a",
            machine="gb300",
            seed=0,
            level=Level.FULL,
            limits=limits(wanted),
            run_seconds=RUN_SECONDS,
            proposal=Proposal(index=0, round=0, template="c0_0", knobs=knobs, source=path.read_text()),
        )
    )
    assert outcome.status is (Status.FAILED if outcome.report is None else Status.REFUSED)
    assert outcome.reason and "\n" not in outcome.reason
    check(wanted, outcome.reason if outcome.report is None else reasons_of(outcome.report))


@pytest.mark.parametrize("path", PAST, ids=lambda p: p.stem)
def test_the_sandbox_holds_without_the_screen(path: Path, op: Op) -> None:
    found = _PAST.search(path.read_text())
    assert found is not None
    template = load_template(path)
    request = CompileRequest.of(op, WORKLOAD, template, template.default)
    try:
        default_server().trace(request, limits(found["reasons"]))
    except CompileError as e:
        check(found["reasons"], str(e))
    else:
        check(found["reasons"], "compiles")


def test_a_whole_run_refuses_them_and_goes_on(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TEST_MODEL_KEY", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(variable, CANARY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    kept = [os.environ[name] for name in ("TEST_MODEL_KEY", "HF_TOKEN")]
    names = (
        "read_environment",
        "write_outside",
        "knob_bomb",
        "no_op",
        "output_cache",
        "module_variable",
        "deadlock",
    )
    sources = {n: (FOLDER / f"{n}.py").read_text() for n in names}
    steps = [Answer(calls=[("submit", {"source": source})]) for source in sources.values()]
    good = Answer(calls=[("submit", {"base": "row"})])
    with serve(*steps, good, Answer(calls=[("finish", {})])) as server, Watch(CANARY) as watch:
        profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY", retries=1)
        result = online.propose(workspace, "rmsnorm", WORKLOAD, Plan(profile, tune_batch=0), workers=2)
    assert kept == [CANARY] * 2 and watch.looked and not watch.seen
    for root in (workspace.root, tmp_path):
        for path in root.rglob("*"):
            assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in result.model_dump_json()
    assert any(CANARY in str(h) for h in server.headers)  # the server alone has seen it
    assert result.winner == len(names)
    assert [c.status for c in result.candidates][-1] is Status.VERIFIED
    for candidate, name in zip(result.candidates, names, strict=False):
        assert candidate.status in (Status.FAILED, Status.REFUSED), name
        reasons = candidate.reason if candidate.report is None else reasons_of(candidate.report)
        check(head(FOLDER / f"{name}.py")["reasons"], reasons)


def test_a_run_goes_on_after_a_compile_that_never_ends(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", CANARY)
    monkeypatch.setattr(begin, "Job", functools.partial(Job, limits=BRIEF, run_seconds=RUN_SECONDS))
    good = Answer(calls=[("submit", {"base": "row"})])
    hanging = [
        Answer(calls=[("submit", {"source": (FOLDER / f"{name}.py").read_text()})])
        for name in ("loops_for_ever", "endless_kernel")
    ]
    times = []
    with serve(good, *hanging, Answer(calls=[("finish", {})])) as server:
        profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY", retries=1)
        result = online.propose(workspace, "rmsnorm", WORKLOAD, Plan(profile, tune_batch=0), workers=1)
        times = [b - a for a, b in itertools.pairwise(server.times)]
    assert result.winner == 0 and len(result.candidates) == 3
    assert result.candidates[1].status is Status.FAILED and result.candidates[1].reason.startswith(
        "timeout: "
    )
    assert result.candidates[2].status is Status.REFUSED and result.candidates[2].report is not None
    assert "time-limit" in reasons_of(result.candidates[2].report)
    # From the answer with the hanging candidate to the next question.
    assert times[1] < BRIEF.seconds + 5 and times[2] < AMPLE.seconds + RUN_SECONDS + 5, times


@pytest.mark.parametrize(
    "name", ["fork_bomb", "encoding_cookie", "operator_bomb", "parentheses_bomb", "knob_bomb"]
)
def test_audit_refuses_too(name: str, tmp_path: Path) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    path = tmp_path / f"{name}.py"
    for text in (source, source.replace("TEMPLATE = ", "OTHER = ")):
        path.write_text(text)
        with pytest.raises(WorkbenchError) as caught:
            api.audit(path, workspace=Workspace(ROOT))
        assert name in str(caught.value) and "\n" not in str(caught.value)
