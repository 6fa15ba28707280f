"""Traces and dumps for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.report.tables import simple_table
from workbench.simulator.trace import Dump, TraceRecord, TraceStep


def print_trace(record: TraceRecord, title: str, console: Console) -> None:
    """A line a step, then the thread's state at each finding that names it."""
    if not record.steps:
        console.print(Text(f"{title}: nothing was executed there"))
        return
    console.print(_table(record.steps, title))
    if record.total > len(record.steps):
        console.print(f"the first {len(record.steps)} of {record.total} steps")
    for dump in record.dumps:
        print_dump(dump, console)


def print_dump(dump: Dump, console: Console) -> None:
    """Registers of a thread at a finding, and the last instructions before it."""
    console.print(Text(f"{dump.rule} at PTX line {dump.ptx_line}: {dump.text}", style="bold red"))
    console.print(_table(dump.steps, f"before it, {dump.thread}"))
    table = simple_table("register", "value", "register", "value", title="registers")
    pairs = sorted(dump.registers.items())
    half = -(-len(pairs) // 2)
    for k in range(half):
        right = pairs[half + k] if half + k < len(pairs) else ("", "")
        table.add_row(*(Text(x) for x in (*pairs[k], *right)))
    console.print(table)


def _table(steps: Sequence[TraceStep], title: str) -> Table:
    addressed = any(s.before is not None for s in steps)
    columns = ["step", "line", "instruction", "values"]
    if addressed:
        columns += ["thread", "bytes"]
    table = simple_table(*columns, title=title, right=("step", "line"))
    for s in steps:
        text = Text(s.text, style="" if s.executed else "dim")
        if s.source is not None:
            text.append(f"\n{s.source}", style="dim")
        values = [f"{name} = {value}" for name, value in s.writes.items()] or [
            f"{name}: {value}" for name, value in s.reads.items()
        ]
        if not s.executed:
            values = ["not executed: its predicate is false"]
        row: list[str | Text] = [str(s.step), str(s.ptx_line), text, Text("\n".join(values))]
        if addressed:
            more = f" and {s.lanes - 1} more" if s.lanes > 1 else " (a copy arrived)" if not s.lanes else ""
            row += [
                Text(s.thread + more),
                s.after or "" if s.before == s.after else f"{s.before} -> {s.after}",
            ]
        table.add_row(*row)
    return table
