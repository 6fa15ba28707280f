"""Whether the audit says the same every time: python benchmarks/determinism.py [--runs N] [--files N]

Audits kernels of tests/verify/ordering/pairs (a spread over all rules) and mutants of those of
tests/acceptance/ordering_kernels again and again: in fresh processes, each with its own PYTHONHASHSEED, by 1,
2 and 8 workers that take the files in different orders. Whole documents are compared: messages, places,
counts, seeds, assumptions. A file is assembled and disassembled once; what is repeated is the audit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ROOT / "tests" / "verify" / "ordering" / "pairs"
KERNELS = ROOT / "tests" / "acceptance" / "ordering_kernels"
FOLDER = ROOT / ".workbench" / "determinism"
WORKERS = (1, 2, 8)


def sample(count: int, mutants: int) -> list[tuple[str, Path, Path]]:
    """Name, PTX and contract of about `count` pairs, spread over the rules, and of `mutants` mutants."""
    found: list[tuple[str, Path, Path]] = []
    rules = sorted(p for p in PAIRS.iterdir() if p.is_dir())
    each = max(1, -(-count // len(rules)))
    for rule in rules:
        for wrong in sorted(rule.glob("*.wrong.ptx"))[:each]:
            terms = wrong.with_name(wrong.name.replace(".wrong.ptx", ".toml"))
            for side in ("wrong", "right"):
                path = wrong.with_name(wrong.name.replace(".wrong.", f".{side}."))
                found.append((f"{rule.name}/{path.stem}", path, terms))
    sys.path.insert(0, str(ROOT / "tests" / "acceptance"))
    from ordering_mutations import mutants as made

    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = [(k, m) for k in sorted(KERNELS.glob("*.ptx")) for m in made(k.read_text())]
    for n in range(0, len(cases), max(1, len(cases) // max(1, mutants))):
        kernel, mutant = cases[n]
        path = FOLDER / f"{kernel.stem}_{n}.ptx"
        if not path.is_file() or path.read_text() != mutant.text:
            path.write_text(mutant.text)
        found.append((f"{kernel.stem}: {mutant.label}", path, kernel.with_suffix(".toml")))
    return found


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function of bytes or text returns, in a file for all processes."""

    def call(given: bytes | str, *rest: object) -> object:
        raw = given.encode() if isinstance(given, str) else given
        path = FOLDER / hashlib.sha256(function.__name__.encode() + raw).hexdigest()
        if not path.is_file():
            made = path.with_suffix(f".{os.getpid()}")
            made.write_bytes(pickle.dumps(function(given, *rest)))
            made.replace(path)
        return pickle.loads(path.read_bytes())

    return call


def work(runs: int, seed: int, part: int, parts: int, count: int, mutants: int) -> None:
    """Audit this worker's files `runs` times in an order of its own; print a digest for each audit."""
    from workbench.verify.ordering import audit_file, files

    files._assemble = _kept(files._assemble)
    files.disassemble = _kept(files.disassemble)
    chosen = sample(count, mutants)[part::parts]
    for _ in range(runs):
        random.Random(seed).shuffle(chosen)
        seed += 1
        for name, path, terms in chosen:
            text = audit_file(path, terms if terms.is_file() else None).model_dump_json()
            print(json.dumps([name, hashlib.sha256(text.encode()).hexdigest(), text]), flush=True)


def main() -> int:
    """Run all and compare; 0 if every audit of a file gave the same document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="audits of each file, all workers together")
    parser.add_argument("--files", type=int, default=30, help="pairs, about")
    parser.add_argument("--mutants", type=int, default=15)
    parser.add_argument("--processes", type=int, default=10, help="fresh processes, each with a hash seed")
    parser.add_argument("--work", type=int, nargs=4, metavar=("RUNS", "SEED", "PART", "PARTS"))
    given = parser.parse_args()
    if given.work:
        work(*given.work, given.files, given.mutants)
        return 0
    start = time.perf_counter()
    documents: dict[str, Counter[str]] = {}
    texts: dict[str, str] = {}
    runs = -(-given.runs // given.processes)
    for n in range(given.processes):
        parts = WORKERS[n % len(WORKERS)]
        command = [sys.executable, __file__, "--files", str(given.files), "--mutants", str(given.mutants)]
        children = [
            subprocess.Popen(
                [*command, "--work", str(runs), str(1000 * n), str(part), str(parts)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(17 * n + part)},
            )
            for part in range(parts)
        ]  # fmt: skip
        for child in children:
            assert child.stdout is not None
            for line in child.stdout:
                name, digest, text = json.loads(line)
                documents.setdefault(name, Counter())[digest] += 1
                texts[digest] = text
        if any(child.wait() for child in children):
            return 2
    differ = {name: seen for name, seen in documents.items() if len(seen) > 1}
    for name, seen in sorted(differ.items()):
        print(f"{name}: {len(seen)} documents in {seen.total()} audits")
        for digest in list(seen)[:2]:
            print(f"    {seen[digest]} times: {texts[digest]}")
    counts = {seen.total() for seen in documents.values()}
    by = ", ".join(map(str, WORKERS))
    print(
        f"{len(documents)} files, {min(counts)} to {max(counts)} audits each by {by} workers: "
        f"{len(differ)} differ; {time.perf_counter() - start:.0f} s"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
