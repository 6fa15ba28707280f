"""The desk a kernel's author works at: contracts and templates to read, candidates to submit and look at.

The same desk serves a conversation of `propose` and an outside agent over MCP. Whatever it answers is text,
the same each time, and an answer to a mistaken request says what to do instead.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from workbench.agent.evaluate import load_artifact
from workbench.agent.evaluations import Evaluations
from workbench.agent.feedback import CHAIN_STRIDE, compare, describe, name_of
from workbench.agent.run import Candidate, Proposal, RunSettings, Status
from workbench.artifact import Artifact
from workbench.errors import WorkbenchError
from workbench.expressions import Value
from workbench.ops.model import Op, Workload
from workbench.templates import Template, load_template, parse_template
from workbench.verify.runs import Level
from workbench.workspace import Workspace

MAX_POINTS = 100_000
"""Largest space that is enumerated for an author."""
MAX_CANDIDATES = CHAIN_STRIDE - 1
"""Candidates a chain may submit."""


class DeskError(WorkbenchError):
    """A request that cannot be met; the text goes back to the author."""


@dataclass(frozen=True)
class Edit:
    """Replace one piece of text by another; the old one must occur exactly once."""

    old: str
    new: str


@dataclass
class Desk:
    """One author's desk.

    Args:
        workspace: holds contracts, templates and documentation.
        op: the op that is worked on.
        workload: the workload that times are predicted at.
        settings: of the run.
        roofline_us: least time of the workload.
        evaluations: where candidates are evaluated.
        chain: number of the conversation; candidates of different chains have different indices.
    """

    workspace: Workspace
    op: Op
    workload: Workload
    settings: RunSettings
    roofline_us: float
    evaluations: Evaluations
    chain: int = 0
    candidates: dict[int, Candidate] = field(default_factory=dict)
    """Everything evaluated at this desk, tuned variants included, by index."""
    elsewhere: dict[str, Candidate] = field(default_factory=dict)
    """What the conversations of the run had found when they last met: by object hash, the first of each."""
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, what: str, name: str = "") -> str:
        """Return a text: `contract`, `template`, `rule` or `notes`.

        Raises:
            DeskError: if there is no such text.
        """
        match what:
            case "contract":
                return self.workspace.verifier(self.op.name).read_text()
            case "template":
                return self._template(name).source
            case "rule":
                return self._page("rules", name)
            case "notes":
                return self._page("", name or "cute_dsl")
        raise DeskError(f"there is no {what!r} to read; read contract, template, rule or notes")

    def _page(self, folder: str, name: str) -> str:
        root = self.workspace.docs / folder if folder else self.workspace.docs
        known = sorted(p.stem for p in root.glob("*.md")) if root.is_dir() else []
        if name not in known:
            raise DeskError(f"there is no page {name!r}; there are: {', '.join(known) or 'none'}")
        return (root / f"{name}.md").read_text()

    def _template(self, name: str) -> Template:
        known = self.workspace.template_names(self.op.name)
        if name not in known:
            raise DeskError(f"there is no template {name!r}; there are: {', '.join(known) or 'none'}")
        return load_template(self.workspace.template(self.op.name, name))

    def space(self, name: str) -> str:
        """Describe the knobs of a template or candidate and count its points at the workload."""
        template = self._template_of(name)
        space = template.space(self.workload.axes)
        if math.prod(map(len, space.knobs.values())) > MAX_POINTS:
            raise DeskError(f"the space of {name} has more than {MAX_POINTS} points; declare fewer values")
        lines = [
            f"{k}: {', '.join(map(str, v))} (default {template.default[k]})" for k, v in space.knobs.items()
        ]
        lines += [f"constraint: {c}" for c in space.constraints]
        return "\n".join([*lines, f"{len(space.all_points)} points at {self.workload.name}"])

    def _template_of(self, name: str) -> Template:
        if name in self.workspace.template_names(self.op.name):
            return self._template(name)
        proposal = self.find(name).proposal
        if not proposal.source:
            return self._template(proposal.template)
        return parse_template(proposal.source, Path(f"{proposal.template}.py"))

    def _source_of(self, name: str) -> str:
        if name in self.workspace.template_names(self.op.name):
            return self._template(name).source
        proposal = self.find(name).proposal
        return proposal.source or self._template(proposal.template).source

    # -- candidates ------------------------------------------------------------------------------

    def submit(
        self,
        source: str | None,
        base: str | None,
        edits: tuple[Edit, ...],
        knobs: dict[str, Value],
        idea: str = "",
        round_: int = 0,
    ) -> Future[Candidate]:
        """Have a candidate evaluated: a whole source, or the source of `base` with some edits.

        Args:
            source: the whole file; None with a base.
            base: a candidate's or template's name.
            edits: made to the base's source, in order.
            knobs: those that differ from the default.
            idea: what is tried, in one line.
            round_: turn of the conversation.

        Raises:
            DeskError: if the request itself is wrong; a source that is wrong is a candidate's outcome.
        """
        parents: tuple[int, ...] = ()
        if (source is None) == (base is None):
            raise DeskError("give either source (a whole file) or base (a candidate or template) with edits")
        if base is not None:
            source = self._source_of(base)
            if base not in self.workspace.template_names(self.op.name):
                parents = (self.find(base).proposal.index,)
            for edit in edits:
                source = _edited(source, edit)
        elif edits:
            raise DeskError("edits need a base; with a whole source leave them out")
        assert source is not None
        try:
            default = parse_template(source, Path("candidate.py")).default
        except WorkbenchError:
            default = {}  # the evaluation says what is wrong
        unknown = sorted(set(knobs) - set(default)) if default else []
        if unknown:
            raise DeskError(f"the source has no knob {unknown[0]!r}; it has {', '.join(default)}")
        index = self._take_index()
        name = name_of(index).replace("-", "_")
        proposal = Proposal(
            index=index,
            round=round_,
            template=name,
            knobs={**default, **knobs},
            source=source,
            parents=parents,
            idea=" ".join(idea.split())[:200],
        )
        return self.evaluations.submit(proposal)

    def variant(self, of: Candidate, knobs: dict[str, Value], round_: int) -> Future[Candidate]:
        """Have a candidate evaluated with other knobs."""
        changes = {
            "index": self._take_index(),
            "knobs": knobs,
            "parents": (of.proposal.index,),
            "round": round_,
            "idea": "knobs tuned",
        }
        proposal = of.proposal.model_copy(update=changes)
        return self.evaluations.submit(proposal)

    def _take_index(self) -> int:
        with self._lock:
            if self._next > MAX_CANDIDATES:
                raise DeskError(f"more than {MAX_CANDIDATES} candidates")
            self._next += 1
            return self.chain * CHAIN_STRIDE + self._next - 1

    def keep(self, candidate: Candidate) -> None:
        """Remember an evaluated candidate."""
        self.candidates[candidate.proposal.index] = candidate

    def find(self, name: str) -> Candidate:
        """Return a candidate by its name; raises DeskError."""
        found = {name_of(i): c for i, c in self.candidates.items()}
        if name not in found:
            raise DeskError(f"there is no candidate {name!r}; there are: {', '.join(found) or 'none yet'}")
        return found[name]

    def report(self, candidate: Candidate) -> str:
        """Return what the author is told about a candidate."""
        return describe(candidate, self.roofline_us, self._artifact(candidate), self._earlier(candidate))

    def _earlier(self, candidate: Candidate) -> str:
        """What compiled to the same kernels before: a candidate, or a template under another source."""
        wanted = candidate.object_hash
        known = [c for c in self.candidates.values() if wanted and c.object_hash == wanted]
        if wanted in self.elsewhere:
            known.append(self.elsewhere[wanted])
        first = min(known, key=lambda c: c.order, default=candidate)
        if first.order < candidate.order:
            index = first.proposal.index
            return name_of(index) + ("" if index in self.candidates else " of another conversation")
        name = candidate.same_as_template
        if not name or candidate.proposal.source == self._template(name).source:
            return ""
        return f"template {name}"

    def bound(self, name: str) -> str:
        """Return what the cost model says bounds a candidate."""
        c = self.find(name)
        if c.prediction is None:
            raise DeskError(f"{name} did not run to its end, so that nothing is predicted of it")
        return c.prediction.explain()

    def compare(self, a: str, b: str) -> str:
        """Return two candidates side by side."""
        return compare(self.find(a), self.find(b))

    def check(self, candidate: Candidate) -> Candidate:
        """Put a candidate through every check; one that fails is no longer a verified one.

        One that there is not the memory to check stays what it was.
        """
        checked = self.evaluations.submit(candidate.proposal, Level.FULL).result()
        if checked.status not in (Status.VERIFIED, Status.LOST):
            self.keep(checked)
        return checked

    def best(self) -> Candidate | None:
        """Return the verified candidate with the shortest predicted time; of equals the first."""
        good = [c for c in self.candidates.values() if c.predicted_us is not None]
        return min(good, key=lambda c: (c.predicted_us or 0.0, c.order), default=None)

    def _artifact(self, candidate: Candidate) -> Artifact | None:
        if candidate.artifact_key is None or candidate.status is Status.VERIFIED:
            return None
        try:
            return load_artifact(self.workspace, candidate.artifact_key)
        except KeyError:
            return None


def _edited(source: str, edit: Edit) -> str:
    count = source.count(edit.old) if edit.old else 0
    if count != 1:
        first = (edit.old.splitlines() or [""])[0][:60]
        raise DeskError(
            f"the text {first!r} of an edit occurs {count} times in the base; it must occur exactly once"
        )
    return source.replace(edit.old, edit.new)
