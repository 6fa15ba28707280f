"""Holds what a bundle states against what was found here, point by point.

Two results are compared only where their premises are equal. Where a premise differs, a result that comes out
otherwise is `not repeated`, with the premise named, and not a disagreement; but a check that fails here is
always one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from workbench.cost import Prediction
from workbench.export.evidence.bundle import MeasuredTime, timing_premises
from workbench.export.manifest import CheckVerdict
from workbench.export.provenance import Provenance
from workbench.export.waivers import fingerprint, waivers_for
from workbench.report.evidence import EvidencePoint, Status
from workbench.verify.report import Check, Report, Verdict

FIGURES = 0.05
"""Share of its limit by which a figure may differ: another processor rounds the honest baseline otherwise."""
TIMES = 0.10
"""Share by which the medians of two measured times of equal premises may differ."""
_HASH = 12


class Points:
    """Points of one kernel, in the order in which they were found."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.all: list[EvidencePoint] = []

    def premise(self, name: str, stated: str, found: str, detail: str = "") -> bool:
        """Note a premise; returns whether it is the same here."""
        status: Status = "agree" if stated == found else "differ"
        self._add(name, "premise", status, stated, found, detail)
        return stated == found

    def unstated(self, name: str, found: str, detail: str) -> None:
        """Note a premise that the bundle does not state."""
        self._add(name, "premise", "not repeated", "not recorded", found, detail)

    def equal(self, name: str, stated: str, found: str, because: Sequence[str] = ()) -> bool:
        """Note a result that must be the same, unless one of the premises `because` differs."""
        if stated == found:
            self._add(name, "result", "agree", stated, found)
        elif because:
            self.left(name, stated, f"premises differ: {', '.join(because)}", found)
        else:
            self._add(name, "result", "differ", stated, found)
        return stated == found

    def agree(self, name: str, stated: str, found: str, detail: str = "") -> None:
        """Note a result that agrees."""
        self._add(name, "result", "agree", stated, found, detail)

    def differ(self, name: str, stated: str, found: str, detail: str = "") -> None:
        """Note a result that disagrees."""
        self._add(name, "result", "differ", stated, found, detail)

    def left(self, name: str, stated: str, why: str, found: str = "") -> None:
        """Note a result that was not repeated, or not under the same premises."""
        self._add(name, "result", "not repeated", stated, found, why)

    def _add(self, name: str, kind: str, status: Status, stated: str, found: str, detail: str = "") -> None:
        self.all.append(
            EvidencePoint(
                kernel=self.kernel,
                name=name,
                kind="premise" if kind == "premise" else "result",
                status=status,
                stated=stated,
                found=found,
                detail=detail,
            )
        )


def short(digest: str | None) -> str:
    """Beginning of a hash, for people."""
    return digest[:_HASH] if digest else "none"


def compare_provenance(points: Points, stated: Provenance | None, found: Provenance) -> list[str]:
    """Note what a verification rests on; returns the names of what differs or was not recorded."""
    if stated is None:
        points.unstated(
            "verification", f"seed {found.seed}", "the export recorded no premises; seed 0 is taken"
        )
        return ["the export recorded no premises"]
    same = {
        "seed": points.premise("seed", str(stated.seed), str(found.seed)),
        "contract": points.premise("contract", short(stated.op_hash), short(found.op_hash)),
        "tolerances": points.premise("tolerances", short(stated.tolerance_hash), short(found.tolerance_hash)),
        "verifier": points.premise("verifier", short(stated.verifier_hash), short(found.verifier_hash)),
        "workbench": points.premise(
            "workbench",
            f"{stated.workbench} {short(stated.workbench_hash)}",
            f"{found.workbench} {short(found.workbench_hash)}",
        ),
        "libraries": points.premise("libraries", _listed(stated.libraries), _listed(found.libraries)),
        "machine": points.premise(
            "machine", f"{stated.machine}, Python {stated.python}", f"{found.machine}, Python {found.python}"
        ),
    }
    return [name for name, equal in same.items() if not equal]


def compare_reports(
    points: Points, stated: Report, verdicts: Sequence[CheckVerdict], source_hash: str, found: Report,
    because: Sequence[str],
) -> None:  # fmt: skip
    """Note each check of two reports of the same code.

    Args:
        points: receives them.
        stated: the bundle's report.
        verdicts: its checks with their waivers.
        source_hash: of the kernel's source, which waivers are for.
        found: the report made here.
        because: premises that differ.
    """
    here = {c.name: c for c in found.checks}
    waived = {v.name: v for v in verdicts if v.waived}
    for check in stated.checks:
        again = here.pop(check.name, None)
        name = f"check {check.name}"
        if again is None:
            points.left(name, check.verdict.value, "there is no such check here")
            continue
        _compare_check(points, name, check, again, because)
        if check.name in waived:
            _compare_waiver(points, waived[check.name], again, source_hash)
    for check in here.values():
        name = f"check {check.name}"
        if check.verdict is Verdict.PASS:
            points.agree(name, "not in the bundle", check.verdict.value)
        else:
            add = points.differ if check.verdict is Verdict.FAIL else points.left
            add(name, "not in the bundle", f"{check.verdict.value}: {check.summary}")


def _compare_check(points: Points, name: str, stated: Check, found: Check, because: Sequence[str]) -> None:
    was, now = stated.verdict.value, found.verdict.value
    if found.verdict is Verdict.FAIL and stated.verdict is not Verdict.FAIL:
        points.differ(name, was, now, found.summary)
        return
    if stated.verdict is not found.verdict:
        if found.verdict is Verdict.PASS:
            points.agree(name, was, now, "decided here")
        elif because:
            points.left(name, was, f"{found.summary}; premises differ: {', '.join(because)}", now)
        else:
            points.differ(name, was, now, found.summary)
        return
    unequal, close = compare_figures(stated.measures, found.measures)
    lost, fresh = _findings(stated, found)
    told = [f"figures differ: {_some(unequal)}"] if unequal else []
    told += [f"{n} findings {what}" for n, what in ((lost, "are gone"), (fresh, "are new")) if n]
    if told and not because:
        points.differ(name, was, now, "; ".join(told))
    elif told:
        points.left(name, was, f"{'; '.join(told)}; premises differ: {', '.join(because)}", now)
    else:
        detail = f"within {FIGURES:.0%} of the limits: {_some(close)}" if close else ""
        points.agree(name, was, now, detail)


def _compare_waiver(points: Points, stated: CheckVerdict, found: Check, source_hash: str) -> None:
    name = f"waiver of {stated.name}"
    if found.verdict is Verdict.PASS:
        points.agree(name, "waived", "not needed here")
    elif not stated.waivers:
        points.agree(name, "the check is waived by name", found.verdict.value)
    else:
        who = ", ".join(dict.fromkeys(w.person for w in stated.waivers))
        text = f"{len(stated.waivers)} findings waived by {who}"
        if waivers_for(found, source_hash, stated.waivers) is not None:
            points.agree(name, text, "covers what is undecided here")
        else:
            points.differ(name, text, "does not cover what is undecided here, or is for another source")


def compare_figures(stated: Mapping[str, float], found: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Figures that differ, and those that differ by no more than `FIGURES` of their limit."""
    unequal: list[str] = []
    close: list[str] = []
    for name in sorted(stated.keys() | found.keys()):
        a, b = stated.get(name), found.get(name)
        text = f"{name} {_figure(a)} / {_figure(b)}"
        if a is None or b is None:
            unequal.append(text)
        elif a == b or (math.isnan(a) and math.isnan(b)):
            continue
        else:
            limit = stated.get(f"{name}_limit", a if name.endswith("_limit") else None)
            near = limit is not None and abs(a - b) <= FIGURES * abs(limit)
            (close if near else unequal).append(text)
    return unequal, close


def compare_predictions(points: Points, stated: Prediction, found: Prediction | None, why: str) -> None:
    """Note the predicted time; `why` says why there is none here."""
    text = f"{stated.us:.3f} us"
    if found is None:
        points.left("predicted time", text, why)
        return
    a, b = stated.premises, found.premises
    fields = ("machine_hash", "model_version", "code", "assumptions")
    odd = [n for n in fields if getattr(a, n) != getattr(b, n)]
    same = math.isclose(stated.us, found.us, rel_tol=1e-9)
    if odd:
        points.left("predicted time", text, f"premises differ: {', '.join(odd)}", f"{found.us:.3f} us")
    elif same:
        points.agree("predicted time", text, f"{found.us:.3f} us", f"for {b.machine}, not measured")
    else:
        points.differ("predicted time", text, f"{found.us:.3f} us")


def compare_timings(points: Points, stated: MeasuredTime, found: MeasuredTime) -> None:
    """Note the measured time: medians are held against each other under equal premises alone."""
    a, b = timing_premises(stated), timing_premises(found)
    odd = [n for n in a if a[n] != b[n]]
    was, now = measured_text(stated), measured_text(found)
    if odd:
        points.left("measured time", was, f"premises differ: {', '.join(odd)}", now)
        return
    ratio = found.median_us / stated.median_us
    detail = f"{ratio:.3f} times the stated median"
    add = points.agree if abs(ratio - 1) <= TIMES else points.differ
    add("measured time", was, now, f"{detail}, {TIMES:.0%} are allowed")


def measured_text(timing: MeasuredTime) -> str:
    """A measured time in a few words."""
    n = len(timing.samples_us)
    return f"{timing.median_us:.3f} us, median of {n} on {timing.device.get('name', '?')}, L2 {timing.l2}"


def _findings(stated: Check, found: Check) -> tuple[int, int]:
    """How many findings are gone, and how many are new."""
    a = Counter(fingerprint(stated.name, f) for f in stated.findings)
    b = Counter(fingerprint(found.name, f) for f in found.findings)
    return (a - b).total(), (b - a).total()


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{n} {v}" for n, v in sorted(versions.items()))


def _some(texts: Iterable[str], most: int = 3) -> str:
    listed = list(texts)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"


def _figure(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4g}"
