"""SentryWard beside our audit, on the pairs of wrong and right kernels of `tests/verify/ordering`.

`python benchmarks/sentryward.py --tool PATH` runs both on every PTX pair whose contract launches one kernel
and prints a table a rule; `--pairs` prints each kernel too, `--json FILE` keeps the rows. The tool is
SentryWard's command line, installed by whoever wants the comparison (`pip install sentryward` in an
environment of its own); nothing here depends on it. It is given what our audit is given: the PTX, the launch
and the scalars. It targets sm_100a, so that `.target` is changed to that in its copy.
"""

from __future__ import annotations

import argparse
import collections
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
    theirs: str
    """pass, fail, or undecided."""
    why: str
    """What the other tool said: its result, and the first diagnostic."""
    our_seconds: float
    their_seconds: float


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


def examine(tool: str, pair: pairing.Pair) -> list[Row] | str:
    """Both kernels of a pair under both tools, or why the other one cannot be asked."""
    if pair.wrong.suffix != ".ptx":
        return f"{pair.wrong.suffix} source"
    if pair.contract is None:
        return "no contract"
    rows = []
    for side, source in (("wrong", pair.wrong), ("right", pair.right)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path, toml = folder / "kernel.ptx", folder / "contract.toml"
            path.write_text(source.text)
            toml.write_text(pair.contract)
            config = configuration(load_contract(toml), source.text)
            if isinstance(config, str):
                return config
            verdict, why, seconds = theirs(tool, folder, source.text, config)
            start = time.monotonic()
            try:
                document = audit_file(path, toml)
                mine = document.verdict.value
            except WorkbenchError as e:
                mine = f"error: {e}"
            rows.append(
                Row(
                    pair.rule, pair.name, side, "fail" if side == "wrong" else "pass", mine, verdict, why,
                    round(time.monotonic() - start, 3), round(seconds, 3),
                )
            )  # fmt: skip
    return rows


def table(rows: list[Row], left: dict[str, int]) -> str:
    """Counts a rule: kernels, what each tool found and passed, and why the other one did not decide."""
    lines = [
        "| rule | pairs | wrong: ours | wrong: theirs | right: ours | right: theirs | theirs undecided |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    total: collections.Counter[str] = collections.Counter()
    for rule in sorted({r.rule for r in rows}):
        mine = [r for r in rows if r.rule == rule]
        counts = {
            "pairs": len(mine) // 2,
            "wrong ours": sum(r.ours == "fail" for r in mine if r.side == "wrong"),
            "wrong theirs": sum(r.theirs == "fail" for r in mine if r.side == "wrong"),
            "right ours": sum(r.ours == "pass" for r in mine if r.side == "right"),
            "right theirs": sum(r.theirs == "pass" for r in mine if r.side == "right"),
            "undecided": sum(r.theirs == "undecided" for r in mine),
        }
        total.update(counts)
        lines.append(f"| {rule} | " + " | ".join(str(n) for n in counts.values()) + " |")
    lines.append("| all | " + " | ".join(str(n) for n in total.values()) + " |")
    decided = [r for r in rows if r.theirs != "undecided"]
    agree = sum(r.theirs == r.ours for r in decided)
    lines += [
        "",
        f"{len(rows)} kernels; theirs decides {len(decided)}, and agrees with ours on {agree} of them; "
        f"with what is expected, ours on {sum(r.ours == r.expected for r in rows)} of {len(rows)}, theirs on "
        f"{sum(r.theirs == r.expected for r in rows)}.",
        "",
        "Undecided, by what it says:",
        "",
    ]
    reasons = collections.Counter(r.why for r in rows if r.theirs == "undecided")
    lines += [f"- {n} kernels: {why}" for why, n in reasons.most_common()]
    lines += ["", "Pairs not given to it:", ""]
    lines += [f"- {n}: {why}" for why, n in sorted(left.items())] or ["none"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", default="sentryward", help="SentryWard's command line")
    parser.add_argument("--pairs", action="store_true", help="print every kernel")
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--only", help="pairs of this rule alone")
    arguments = parser.parse_args()
    rows: list[Row] = []
    left: collections.Counter[str] = collections.Counter()
    for pair in pairing.pairs():
        if arguments.only and pair.rule != arguments.only:
            continue
        found = examine(arguments.tool, pair)
        if isinstance(found, str):
            left[found] += 1
            continue
        rows += found
        if arguments.pairs:
            for r in found:
                print(f"{r.rule} {r.pair} {r.side}: ours {r.ours}, theirs {r.theirs} ({r.why})", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    print(table(rows, left))


if __name__ == "__main__":
    main()
