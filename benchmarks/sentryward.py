"""SentryWard beside our audit, on the pairs of wrong and right kernels of `tests/verify/ordering`.

`python benchmarks/sentryward.py --tool PATH` runs both on every pair in PTX or CUDA whose contract launches
one kernel and prints a table a rule and one of causes; `--write PAGE` puts both between the marks of a
page, `--pairs` prints each kernel too. `--json FILE` keeps the rows after each pair, and what FILE holds of
a source that has not changed is not run again. The tool is SentryWard's command line, installed by whoever
wants the comparison (`pip install sentryward` in an environment of its own); nothing here depends on it. It
is given what our audit is given: the PTX (of CUDA sources nvcc's), the launch and the scalars. It targets
sm_100a, so that `.target` is changed to that in its copy. The exit code is 1 if a disagreement has no cause
in `cause`, or ours is not as expected.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "verify" / "ordering"))

import pairing  # noqa: E402

from workbench.errors import WorkbenchError  # noqa: E402
from workbench.isa.ptx import parse  # noqa: E402
from workbench.verify.contract import Contract, load_contract  # noqa: E402
from workbench.verify.ordering import audit_file  # noqa: E402

_VERDICTS = {
    "race_free": "pass",
    "potential_race": "fail",
    "not_wellsynced": "fail",
    "invalid_lifecycle": "fail",
}
_SECONDS = 60


@dataclass
class Row:
    """One kernel under both tools."""

    rule: str
    pair: str
    side: str
    """wrong or right."""
    expected: str
    ours: str
    """pass, fail, unknown, or noted: passed, with a finding of the rule that its page says is no error."""
    theirs: str
    """pass, fail, or undecided."""
    why: str
    """What the other tool said: its result, and the first diagnostic."""
    our_seconds: float
    their_seconds: float
    source: str = ""
    """Hash of the kernel and its contract."""


def configuration(contract: Contract, text: str) -> dict[str, Any] | str:
    """The tool's input file for a contract, or why there is none."""
    if len(contract.kernel) != 1:
        return f"{len(contract.kernel)} launches"
    kernel = contract.kernel[0]
    module = parse(text)
    if len(module.kernels) != 1:
        return f"{len(module.kernels)} kernels"
    params = module.kernels[0].params
    arguments = [
        {"parameter": s.param, "type": params[s.param].type, "value": s.value}
        for s in kernel.scalar
        if params[s.param].type is not None
    ]
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": module.kernels[0].name,
        "launch": {
            "grid_dim": list(kernel.grid),
            "block_dim": list(kernel.block),
            "cluster_dim": list(kernel.cluster),
            "dynamic_shared_bytes": kernel.smem_bytes,
        },
        "arguments": arguments,
    }


def theirs(tool: str, folder: Path, text: str, config: dict[str, Any]) -> tuple[str, str, float]:
    """Verdict, reason and seconds of the other tool."""
    (folder / "other.ptx").write_text(re.sub(r"\.target\s+sm_\w+", ".target sm_100a", text))
    (folder / "other.json").write_text(json.dumps(config))
    command = [tool, str(folder / "other.ptx"), "--input", str(folder / "other.json")]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--timeout", str(_SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * _SECONDS,
    )
    seconds = time.monotonic() - start
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return "undecided", f"no report (status {done.returncode})", seconds
    said = str(report.get("result"))
    code = next((str(d.get("code")) for d in report.get("diagnostics", ())), "")
    return _VERDICTS.get(said, "undecided"), f"{said} {code}".strip(), seconds


def hashed(source: pairing.Source, contract: str) -> str:
    """What a row of an earlier run is recognised by."""
    return hashlib.sha256(f"{source.text}\0{contract}".encode()).hexdigest()[:16]


def examine(tool: str, pair: pairing.Pair, known: dict[tuple[str, str, str, str], Row]) -> list[Row] | str:
    """Both kernels of a pair under both tools, or why the other one cannot be asked."""
    if pair.wrong.suffix == ".py":
        return "CuTe DSL sources (.py)"
    if pair.wrong.suffix == ".cu" and pairing.nvcc() is None:
        return "CUDA sources (.cu), as there is no nvcc"
    if pair.contract is None:
        return "no contract"
    rows = []
    name = pair.name if pair.wrong.suffix == ".ptx" else f"{pair.name}{pair.wrong.suffix}"
    for side, source in (("wrong", pair.wrong), ("right", pair.right)):
        mark = hashed(source, pair.contract)
        if (earlier := known.get((pair.rule, name, side, mark))) is not None:
            rows.append(earlier)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path, toml = folder / "kernel.ptx", folder / "contract.toml"
            text = pairing.to_ptx(source.text, folder) if source.suffix == ".cu" else source.text
            path.write_text(text)
            toml.write_text(pair.contract)
            config = configuration(load_contract(toml), text)
            if isinstance(config, str):
                return config
            verdict, why, seconds = theirs(tool, folder, text, config)
            start = time.monotonic()
            try:
                document = audit_file(path, toml)
                mine = document.verdict.value
                named = [f for t in document.targets for f in t.findings if f.rule == pair.rule]
                if mine == "pass" and any(f.severity in pairing.severities(pair.rule) for f in named):
                    mine = "noted"
            except WorkbenchError as e:
                mine = f"error: {e}"
            ours = round(time.monotonic() - start, 3)
            expected = "fail" if side == "wrong" else "pass"
            rows.append(
                Row(pair.rule, name, side, expected, mine, verdict, why, ours, round(seconds, 3), mark)
            )
    return rows


# -- what the rows say ----------------------------------------------------------------------------

CAUSES = {
    "fences": (
        'Fences, scopes, acquire and release have no meaning to it ("Fences and the full PTX memory '
        'model are not modeled."): barriers and mbarriers order all memory of all who meet, in both '
        "proxies."
    ),
    "addresses": "Multicast and unicast addresses of the same bytes are different bytes to it.",
    "pdl": (
        "It looks at one launch by itself: `griddepcontrol.wait` is accepted and orders nothing, and "
        "no other grid runs beside. What the assembler moves is seen in the SASS only, which it does "
        "not read."
    ),
    "nc": "`ld.global.nc` is to it a load like any other, which barriers and waits hold in place.",
    "bounds": "Bounds and alignment of global memory are not its business.",
    "values": "Values that nobody wrote are not its business.",
    "lasting": "Data that lasts from launch to launch is not its business.",
    "exit": (
        "It takes the shared memory of a cluster to live as long as the grid, so that a CTA may exit "
        "while a peer still uses its own."
    ),
    "hangs": "Hangs outside the barriers and mbarriers of one CTA are not looked for.",
    "lifetime": (
        "Tensor memory that is left allocated on some path, or that passes between CTA groups, is not"
        " followed."
    ),
    "elected": "It takes the lane that `elect.sync` elects for the lowest one; the ISA does not say which.",
    "named": (
        "It refuses the wrong kernel without a verdict, with a code that names the fault or comes of it, "
        "so that whoever reads the code has found it; counted as undecided."
    ),
    "polls": (
        'Polls: "Branches and loop bounds may depend on the launch configuration, but not on tensor '
        'data." A flag is data, so that a kernel which branches on one is `unsupported`.'
    ),
    "runtime": "Addresses, sizes or trip counts that it cannot enumerate for this launch.",
    "inputs": "Inputs that the script does not hand on: values of structures, descriptors of tensor maps.",
    "instructions": "Instructions, forms or memory operations that it lacks.",
    "budget": "Its limits of time or of states.",
}
"""What a disagreement comes from, in the order of the page."""

_BY_RULE = {
    "cluster-barrier": "fences",
    "scope-too-narrow": "fences",
    "proxy-fence-missing": "fences",
    "tcgen05-order": "fences",
    "flag-without-acquire": "fences",
    "flag-without-release": "fences",
    "elected-arrive": "fences",
    "multimem-order": "addresses",
    "out-of-bounds": "bounds",
    "misaligned": "bounds",
    "uninitialized-read": "values",
    "persistent-device-state": "lasting",
    "stale-epoch": "lasting",
    "prefetch-sunk": "pdl",
    "nc-load-of-mutable": "nc",
    "pdl-load-before-wait": "pdl",
    "pdl-wait-missing": "pdl",
    "pdl-chain-not-transitive": "pdl",
    "pdl-early-trigger": "pdl",
    "not-co-resident": "hangs",
    "deadlock": "hangs",
    "tmem-lifetime": "lifetime",
}
"""Why a wrong kernel of a rule is `race_free` to it."""

_NAMED = (
    "invalid_named_barrier",
    "collective-participant-mismatch",
    "cluster_wait_without_arrive",
    "st_async_owner",
    "integer_range",
    "tmem_",
)
"""Parts of codes that say of a wrong kernel what is wrong with it."""

_BY_CODE = (
    ("parameter_value", "inputs"),
    ("descriptor", "inputs"),
    ("bulk_copy_variant", "instructions"),
    ("memory_operand", "instructions"),
    ("inval_lifetime", "instructions"),
    ("control_predicate", "polls"),
    ("loop", "runtime"),
    ("address", "runtime"),
    ("alias", "runtime"),
    ("alignment", "runtime"),
    ("resource", "runtime"),
    ("not_static", "runtime"),
    ("unresolved", "runtime"),
    ("unknown", "runtime"),
    ("instruction", "instructions"),
    ("unsupported", "instructions"),
    ("budget", "budget"),
    ("timeout", "budget"),
    ("limit", "budget"),
)
"""Why it does not decide, by a part of the code that it gives; the first that fits."""


def agrees(row: Row) -> bool:
    """Whether the other tool says what is expected."""
    return row.theirs == row.expected


def good(row: Row) -> bool:
    """Whether ours says what is expected: a finding for the wrong kernel, none for the right one."""
    return row.ours in ({"pass"} if row.side == "right" else {"fail", "noted"})


def cause(row: Row) -> str | None:
    """Key of `CAUSES` for a kernel on which the other tool is undecided or not as expected."""
    if row.theirs == "undecided":
        code = row.why.partition(" ")[2] or row.why
        if row.side == "wrong" and any(part in code for part in _NAMED):
            return "named"
        return next((name for part, name in _BY_CODE if part in code), None)
    if row.side == "right":
        return None  # it has failed none so far; each would have to be looked at
    if row.rule == "cluster-barrier" and re.search("exit|last_read", row.pair):
        return "exit"
    if row.rule == "race" and "elected" in row.pair:
        return "elected"
    return _BY_RULE.get(row.rule)


def table(rows: list[Row]) -> list[str]:
    """Counts a rule: kernels, what each tool found and passed."""
    lines = [
        "| rule | pairs | wrong: it finds | wrong: it passes | right: it passes | right: it fails "
        "| undecided | ours as expected |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rule in [*sorted({r.rule for r in rows}), "all"]:
        mine = [r for r in rows if rule in (r.rule, "all")]
        wrong, right = ([r.theirs for r in mine if r.side == side] for side in ("wrong", "right"))
        cells = [
            len(wrong), wrong.count("fail"), wrong.count("pass"), right.count("pass"), right.count("fail"),
            sum(r.theirs == "undecided" for r in mine), f"{sum(map(good, mine))} of {len(mine)}",
        ]  # fmt: skip
        lines.append(f"| {rule} | " + " | ".join(str(n) for n in cells) + " |")
    return lines


def named(rows: list[Row]) -> str:
    """The pairs of rows, by rule; a pair of which one kernel alone is meant says which."""
    sides = collections.defaultdict(set)
    for r in rows:
        sides[r.rule, r.pair].add(r.side)
    by_rule = collections.defaultdict(list)
    for (rule, pair), which in sorted(sides.items()):
        by_rule[rule].append(pair if len(which) > 1 else f"{pair} ({which.pop()})")
    return "; ".join(f"`{rule}`: {', '.join(pairs)}" for rule, pairs in by_rule.items())


def causes(rows: list[Row]) -> list[str]:
    """Every kernel that is not decided as expected, under its cause."""
    lines = []
    for title, chosen in (
        (
            "Wrong kernels that it passes, by cause:",
            [r for r in rows if r.theirs != "undecided" and not agrees(r)],
        ),
        ("Kernels that it leaves undecided, by cause:", [r for r in rows if r.theirs == "undecided"]),
    ):
        lines += ["", title, "", "| cause | kernels | which |", "|---|---:|---|"]
        for key, text in [*CAUSES.items(), (None, "**Not explained.**")]:
            if found := [r for r in chosen if cause(r) == key]:
                codes = sorted({f"`{r.why.split()[-1]}`" for r in found if r.theirs == "undecided"})
                said = f" It says {', '.join(codes)}." if codes else ""
                lines.append(f"| {text}{said} | {len(found)} | {named(found)} |")
    return lines


def summary(rows: list[Row], left: dict[str, int]) -> str:
    """What stands between the marks of the page."""
    decided = [r for r in rows if r.theirs != "undecided"]
    passed = sum(r.theirs == "pass" for r in rows if r.side == "wrong")
    failed = sum(r.theirs == "fail" for r in rows if r.side == "right")
    lines = [
        *table(rows),
        "",
        f"{len(rows)} kernels. SentryWard decides {len(decided)}: as expected on {sum(map(agrees, rows))}, "
        f"not on {passed + failed} ({passed} wrong kernels passed, {failed} right ones failed); "
        f"{len(rows) - len(decided)} are undecided. "
        f"Ours is as expected on {sum(map(good, rows))} of {len(rows)}.",
        *causes(rows),
        "",
        "Pairs not given to it: "
        + (", ".join(f"{n} ({why})" for why, n in sorted(left.items())) or "none")
        + ".",
    ]
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Put the text between the marks of the page."""
    before, rest = page.read_text().split("<!-- table -->\n")
    after = rest.split("<!-- end of table -->")[1]
    page.write_text(f"{before}<!-- table -->\n{text}\n<!-- end of table -->{after}")


def keep(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", default="sentryward", help="SentryWard's command line")
    parser.add_argument("--pairs", action="store_true", help="print every kernel")
    parser.add_argument("--json", type=Path, help="read and write the rows")
    parser.add_argument("--only", help="pairs of this rule alone")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the tables between the marks of a page"
    )
    arguments = parser.parse_args()
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else []
    known = {(r["rule"], r["pair"], r["side"], r["source"]): Row(**r) for r in kept}
    rows: list[Row] = []
    left: collections.Counter[str] = collections.Counter()
    for pair in pairing.pairs():
        if arguments.only and pair.rule != arguments.only:
            continue
        found = examine(arguments.tool, pair, known)
        if isinstance(found, str):
            left[found] += 1
            continue
        rows += found
        new = [r for r in found if (r.rule, r.pair, r.side, r.source) not in known]
        known |= {(r.rule, r.pair, r.side, r.source): r for r in new}
        if arguments.json and new:
            keep(arguments.json, list(known.values()))
        if arguments.pairs:
            for r in found:
                print(f"{r.rule} {r.pair} {r.side}: ours {r.ours}, theirs {r.theirs} ({r.why})", flush=True)
    text = summary(rows, left)
    print(text)
    if arguments.write:
        write(arguments.write, text)
    return int(not all((good(r) and (agrees(r) or cause(r) is not None)) for r in rows))


if __name__ == "__main__":
    sys.exit(main())
