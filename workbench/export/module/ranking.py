"""Which of several winners of one configuration is taken, and what to type where that cannot be decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from workbench.cost import Prediction
from workbench.errors import WorkbenchError
from workbench.export.winner import KEY_LENGTH, ExportedKernel

_MOST = 3
"""Configurations that one message tells of."""
_LONGEST = 160
"""Characters of what one premise or knob is told with."""
_PREMISES = ("machine", "machine_hash", "model_version", "code", "assumptions")
"""What times must have in common to be compared: the fields of `Premises.hash`, and the machine's name."""


def best_of(groups: Iterable[Sequence[ExportedKernel]], pick: Collection[str]) -> list[ExportedKernel]:
    """The winner of each group: the one that `pick` names, else the one with the shortest predicted time.

    Args:
        groups: kernels of one op, arch and axes each.
        pick: beginnings of keys.

    Raises:
        WorkbenchError: if a group's times rest on different premises and `pick` names none of it, or if it
            names several of one group; lists the choices with what tells them apart, and the option to type.
    """
    chosen, problems = [], []
    for group in groups:
        picked = [k for k in group if any(k.manifest.key.startswith(p) for p in pick)]
        rest = picked or list(group)
        if len(rest) == 1:
            chosen.append(rest[0])
        elif picked:
            problems.append(f"--pick names {_listed(rest, 'more than one winner')}")
        elif len({_premises_of(k) for k in rest}) > 1 or _premises_of(rest[0]) is None:
            different = "winners whose predicted times rest on different premises and cannot be ranked"
            missing = "winners without a predicted time, which cannot be ranked"
            none = all(_premises_of(k) is None for k in rest)
            problems.append(_listed(rest, missing if none else different))
        else:
            chosen.append(min(rest, key=_predicted))
    if problems:
        more = f"; and {len(problems) - _MOST} more configurations" if len(problems) > _MOST else ""
        raise WorkbenchError(
            f"{'; '.join(problems[:_MOST])}{more}. Add one for each configuration, or remove the others"
        )
    return chosen


def _listed(group: Sequence[ExportedKernel], what: str) -> str:
    """The choices of one configuration, each with the option that takes it."""
    m = group[0].manifest
    texts = _differences([_facts(k) for k in group])
    choices = (f"--pick {k.manifest.key[:KEY_LENGTH]} ({text})" for k, text in zip(group, texts, strict=True))
    return f"{m.op} {m.workload} {m.arch} has {what}: {' or '.join(choices)}"


def _facts(kernel: ExportedKernel) -> dict[str, str]:
    """What is told of a choice, by name; the time first."""
    m, prediction = kernel.manifest, kernel.manifest.prediction
    facts = {"time": _time(prediction), "workload": m.workload, "template": m.template}
    facts |= {name: str(value) for name, value in sorted(m.knobs.items())}
    if prediction is not None:
        premises = prediction.premises.model_dump(mode="json", include=set(_PREMISES))
        premises["machine_hash"] = str(premises["machine_hash"])[:KEY_LENGTH]
        premises["assumptions"] = "; ".join(premises["assumptions"])
        facts |= {name.replace("_", " "): str(premises[name]) for name in _PREMISES}
    facts["source"] = m.source_hash[:KEY_LENGTH]
    return facts


def _time(prediction: Prediction | None) -> str:
    return "no predicted time" if prediction is None else f"{prediction.us:.2f} us predicted"


def _differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Of each choice its time and template, and what else is not alike in all."""
    names = dict.fromkeys(name for f in facts for name in f)
    odd = [n for n in names if len({f.get(n) for f in facts}) > 1 and n not in ("time", "template")]
    if len(odd) > 1 and "source" in odd:
        odd.remove("source")  # says little where anything else differs
    for f in facts:
        told = (f"{n} {f[n][:_LONGEST] or 'none'}" for n in odd if n in f)
        yield ", ".join((f["time"], f"template {f['template']}", *told))


def _premises_of(kernel: ExportedKernel) -> str | None:
    prediction = kernel.manifest.prediction
    return prediction.premises.hash if prediction is not None else None


def _predicted(kernel: ExportedKernel) -> tuple[float, str]:
    prediction = kernel.manifest.prediction
    assert prediction is not None
    return prediction.us, kernel.manifest.key
