"""The report of a run: tables for the terminal, and one JSON document with everything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_check.conduct import Result

FORMAT = 1
_SHOWN = 40
"""Forms of a family, and faults, that the terminal lists."""


def document(
    results: Sequence[Result], machine: dict[str, Any], built: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Everything that was found, raw samples included."""
    return {
        "format": FORMAT,
        "machine": machine,
        "built": built,
        "seconds": round(seconds, 1),
        "sections": [
            {"name": r.section.name, "title": r.section.title, "state": r.state, "why": r.why,
             "seconds": round(r.seconds, 2), "estimate_s": r.section.estimate_s, "records": r.records}
            for r in results
        ],
        "faults": faults(results),
    }  # fmt: skip


def faults(results: Sequence[Result]) -> list[str]:
    """What is wrong: differences that are not allowed, kernels that are not right, sections that failed."""
    found = []
    for r in results:
        if r.state == "failed":
            found.append(f"{r.section.name}: {r.why}")
        for x in r.records:
            if x["record"] == "family" and x["differs"]:
                found.append(f"{x['family']}: {x['differs']} of {x['forms']} forms differ from the simulator")
            elif x["record"] == "family" and not x["repeatable"]:
                found.append(f"{x['family']}: a second run gives other bits")
            elif x["record"] == "numerics" and not x["passed"]:
                found.append(f"{x['kernel']} {x['generator']}: {x['why']}")
            elif x["record"] == "numerics" and not x.get("repeatable", True):
                found.append(f"{x['kernel']} {x['generator']}: a second run gives other bits")
            elif x["record"] == "package" and x["problem"]:
                found.append(
                    f"k3_decode {x['op']} batch {x['batch']} {x['case']} {x['buffer']}: {x['problem']}"
                )
            elif x["record"] == "verdict" and x["answer"] == "yes":
                found.append(f"loads issue past ACQBULK: {x['why']}")
    return found


def write(path: Path, value: dict[str, Any]) -> None:
    """Write the document whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def show(console: Console, results: Sequence[Result], machine: dict[str, Any], built: dict[str, Any]) -> None:
    """Print the report."""
    console.print(
        f"{machine['name']} ({machine['arch']}), {machine['sms']} SMs, driver for CUDA {machine['driver']};"
        f" cubins by ptxas {built['ptxas']}, arch {built['arch']}"
    )
    _sections(console, results)
    refused = len(built["not_on_this_arch"])
    console.print(
        f"built: {refused} forms that the simulator knows are not on {built['arch']};"
        f" {len(built['templates_not_built'])} settings of templates do not build for it; instructions of the"
        f" templates that no family exercises: {', '.join(built['uncovered']) or 'none'}"
    )
    every = [(r, x) for r in results for x in r.records]
    _families(console, [x for _, x in every if x["record"] == "family"])
    _numerics(console, [x for _, x in every if x["record"] == "numerics"])
    _timing(console, [x for _, x in every if x["record"] == "timing"])
    _overhead(console, [x for _, x in every if x["record"] == "overhead"])
    _package(console, [x for _, x in every if x["record"] == "package"])
    _ordering(console, [x for _, x in every if x["record"] in ("variant", "verdict")])
    wrong = faults(results)
    console.print(
        f"{len(wrong)} faults" if wrong else "no fault in what was run", style="red" if wrong else "green"
    )
    for line in wrong[:_SHOWN]:
        console.print(f"  {line}", markup=False, highlight=False)
    if len(wrong) > _SHOWN:
        console.print(f"  {len(wrong) - _SHOWN} more in the JSON report")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for c in columns:
        table.add_column(c, justify="left" if c in columns[:1] else "right", overflow="fold")
    return table


def _sections(console: Console, results: Sequence[Result]) -> None:
    table = _table("Sections", "section", "state", "seconds", "planned", "why")
    table.columns[-1].justify = "left"
    for r in results:
        table.add_row(r.section.title, r.state, f"{r.seconds:.1f}", f"{r.section.estimate_s:.0f}", r.why)
    console.print(table)


def _families(console: Console, found: Sequence[dict[str, Any]]) -> None:
    if not found:
        return
    table = _table(
        "Simulator against hardware, bit by bit", "family", "forms", "elements", "equal", "allowed", "differ"
    )
    for x in found:
        table.add_row(
            x["family"], *(f"{x[k]:,}" for k in ("forms", "elements", "equal", "allowed", "differs"))
        )
    console.print(table)
    console.print("allowed: the ISA leaves bits open (approximate functions, order of sums, NaN); distances:")
    table = _table(
        "", "form", "elements", "other bits", "both NaN", "largest ulp", "beyond", "bound, first example"
    )
    table.columns[-1].justify = "left"
    for x in found:
        unequal = sorted(x["not_equal"], key=lambda d: (d["status"] != "differs", d["name"]))
        for d in unequal[:_SHOWN]:
            ulp = "" if d["max_ulp"] is None else f"{d['max_ulp']:,}"
            detail = "; ".join(t for t in (d["bound"], d["example"]) if t)
            table.add_row(d["name"], f"{d['elements']:,}", f"{d['different']:,}", str(d["nan_payloads"]), ulp,
                          str(d["beyond"]), detail)  # fmt: skip
        if len(unequal) > _SHOWN:
            table.add_row(f"{len(unequal) - _SHOWN} more of {x['family']} in the JSON report", *[""] * 6)
    if table.row_count:
        console.print(table)


def _numerics(console: Console, found: Sequence[dict[str, Any]]) -> None:
    if not found:
        return
    title = "Templates on the device, judged by their contracts"
    table = _table(title, "kernel", "right", "rms error of the worst, its limit", "bits other than simulated")
    for name in dict.fromkeys(x["kernel"] for x in found):
        mine = [x for x in found if x["kernel"] == name]
        right = sum(x["passed"] for x in mine)
        errors = [e for x in mine for e in x.get("errors", {}).values() if not e["exact"]]
        worst = max(errors, key=lambda e: e["rms"] / e["rms_limit"], default=None)
        told = f"{worst['rms']:.2g}, {worst['rms_limit']:.2g}" if worst else "exact"
        table.add_row(name, f"{right} of {len(mine)} inputs", told, _simulated(mine))
    console.print(table)


def _simulated(found: Sequence[dict[str, Any]]) -> str:
    """How the outputs on ordinary inputs differ from those that the simulator made."""
    s = next((x["simulator"] for x in found if x.get("simulator")), None)
    if s is None:
        return "not compared"
    if not s["compared"]:
        return str(s["why"])
    told = f"{s['different']:,} of {s['elements']:,}"
    return told + (f", up to {s['max_ulp']} ulp" if s.get("max_ulp") else "")


def _timing(console: Console, found: Sequence[dict[str, Any]]) -> None:
    if not found:
        return
    methods = list(dict.fromkeys(m for x in found for m in x["measured"]))
    title = "Time in microseconds: predicted, and measured (median of the samples); never ranked together"
    table = _table(title, "kernel", "launches", "predicted", *(f"measured ({m})" for m in methods))
    for x in found:
        cells = []
        for m in methods:
            t = x["measured"].get(m, {})
            cells.append(f"{t['median_us']:.2f}" if "median_us" in t else t.get("failed", ""))
        table.add_row(x["kernel"], str(x["launches"]), f"{x['predicted']['us']:.2f}", *cells)
    console.print(table)
    for op in dict.fromkeys(x["op"] for x in found):
        for workload in dict.fromkeys(x["workload"] for x in found if x["op"] == op):
            _ranks(console, op, workload, [x for x in found if (x["op"], x["workload"]) == (op, workload)])


def _ranks(console: Console, op: str, workload: str, found: Sequence[dict[str, Any]]) -> None:
    method = "graph, flushed"  # what the prediction is of
    if not all("median_us" in x["measured"].get(method, {}) for x in found):
        method = "events, flushed"
    pairs = [
        (x["predicted"]["us"], x["measured"][method]["median_us"])
        for x in found
        if "median_us" in x["measured"].get(method, {})
    ]
    if len(pairs) > 2:
        value = rank_correlation([p for p, _ in pairs], [m for _, m in pairs])
        console.print(f"{op} {workload}: rank correlation, predicted with measured ({method}): {value:.2f}")


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's coefficient, ties averaged; 0 where one of the two does not vary."""
    ra, rb = _rank(a), _rank(b)
    ma, mb = sum(ra) / len(ra), sum(rb) / len(rb)
    cov = sum((x - ma) * (y - mb) for x, y in zip(ra, rb, strict=True))
    size = (sum((x - ma) ** 2 for x in ra) * sum((y - mb) ** 2 for y in rb)) ** 0.5
    return cov / size if size else 0.0


def _rank(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def _overhead(console: Console, found: Sequence[dict[str, Any]]) -> None:
    if not found:
        return
    table = _table("Host time of one call, microseconds", "call", "median", "least", "90 %")
    for x in found:
        if "failed" in x:
            table.add_row(x["what"], x["failed"], "", "")
        else:
            table.add_row(x["what"], *(f"{x[k]:.2f}" for k in ("median_us", "min_us", "p90_us")))
    console.print(table)


def _package(console: Console, found: Sequence[dict[str, Any]]) -> None:
    if found:
        right = sum(not x["problem"] for x in found)
        console.print(f"exported package on this device: {right} of {len(found)} comparisons right")


def _ordering(console: Console, found: Sequence[dict[str, Any]]) -> None:
    variants = [x for x in found if x["record"] == "variant"]
    if not variants:
        return
    table = _table(
        "Loads and griddepcontrol.wait (ACQBULK) under PDL",
        "load",
        "SASS: load stands",
        "loads",
        "overlapped",
        "old values",
        "cycles in the wait, least",
        "cycles of the load, least / median",
    )
    for x in variants:
        wait, load = x["wait_cycles"], x["load_cycles"]
        table.add_row(
            x["variant"],
            _place(x["sass"]),
            f"{x['loads']:,}",
            f"{x['overlapped']:,}",
            f"{x['old_values']:,}",
            f"{wait['min']:,}" if wait and x["clock_between"] else "",
            f"{load['min']:,} / {load['median']:,}" if load and x["clock_between"] else "",
        )
    console.print(table)
    for x in found:
        if x["record"] == "verdict":
            console.print(f"{x['question']} {x['answer']}: {x['why']}", markup=False)


def _place(sass: dict[str, Any]) -> str:
    if not sass["load_after_wait"]:
        return "before the wait"
    return "after the wait" if sass["load_after_barrier"] is not False else "before the barrier"


def lines(results: Iterable[Result]) -> list[str]:
    """One line a section, for progress."""
    return [f"{r.section.title}: {r.state}{': ' + r.why if r.why else ''}" for r in results]
