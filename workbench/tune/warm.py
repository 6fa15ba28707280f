"""Warm start: what earlier records say is worth trying first."""

from __future__ import annotations

from workbench.records import Objective, Record, RecordStore
from workbench.templates import Knobs


def earlier_winners(
    store: RecordStore,
    *,
    op: str,
    template: str,
    workload: str,
    arch: str,
    objective: Objective,
    limit: int = 3,
) -> list[Knobs]:
    """Knobs of the fastest earlier records of a template, the nearest premises first, for `Study(first=...)`.

    Records of the same workload and architecture come first, then those of the same workload, then the
    winners of other workloads. Only their knobs are taken over: every one is evaluated anew, so that records
    of another source, toolchain or verifier may well be used. Records of the other objective are left out.
    """
    groups: dict[tuple[int, str, str], list[Record]] = {}
    for r in store.query(op=op, template=template, objective=objective):
        if r.is_usable:
            distance = (r.key.workload != workload) * 2 + (r.key.arch != arch)
            groups.setdefault((distance, r.key.workload, r.key.arch), []).append(r)
    found: list[Knobs] = []
    seen: set[str] = set()
    for _, records in sorted(groups.items(), key=lambda item: item[0]):
        # Times are compared within one workload and architecture only.
        for r in sorted(records, key=lambda r: (r.value_us or 0.0, r.key.hash)):
            mark = repr(sorted(r.key.knobs.items()))
            if mark not in seen:
                seen.add(mark)
                found.append(dict(r.key.knobs))
    return found[:limit]
