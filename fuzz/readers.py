"""Fuzz a reader: whatever the text, it must parse or raise the project's typed error.

    python fuzz/readers.py ptx|sass|litmus|contract|audit [SECONDS]

Coverage-guided (atheris), from seeds of the test suite, with a mutator that knows lines and tokens. An input
that raises anything else is kept in fuzz/found/, one for each place in the code; move it to
tests/fuzz/corpus/ once it is mended. Exit code 1 if something was found.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "fuzz" / "found"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
READERS = ("ptx", "sass", "litmus", "contract", "audit")
"""`audit` reads PTX and goes on to the static rules."""
_TOKEN = re.compile(r"[%$\w]+|\s+|.")
_EXTREMES = (
    "0",
    "-1",
    "4294967296",
    "18446744073709551615",
    "0x",
    "0f",
    "1e400",
    "%",
    ";",
    "{",
    "}",
    "(",
    ".",
)
_LONGEST = 20_000


def pairs() -> Iterator[Path]:
    """PTX kernels of the test suite, the short ones first."""
    found = sorted(ROOT.glob("tests/verify/ordering/pairs/*/*.ptx"), key=lambda p: p.stat().st_size)
    yield from found[:60]


def seeds(kind: str) -> list[str]:
    """Texts to begin with."""
    texts = [p.read_text() for p in sorted((CORPUS / ("ptx" if kind == "audit" else kind)).glob("*"))]
    if kind in ("ptx", "audit"):
        texts += [p.read_text() for p in pairs()]
    if kind == "contract":
        texts += [p.read_text() for p in sorted(ROOT.glob("tests/verify/ordering/pairs/*/*.toml"))[:60]]
    if kind == "litmus":
        texts += [p.read_text() for p in sorted(ROOT.glob("tests/memory_model/litmus/**/*.litmus"))]
    return texts


def reader(kind: str) -> Callable[[str], object]:
    """Return the reader and what follows it directly, and nothing slow."""
    if kind == "ptx":
        from workbench.isa.ptx import parse, print_module
        from workbench.isa.ptx.cfg import build

        def read_ptx(text: str) -> None:
            module = parse(text)
            for kernel in module.kernels:
                build(kernel)
            parse(print_module(module))

        return read_ptx
    if kind == "sass":
        from workbench.isa.sass import parse_sass
        from workbench.isa.sass.cfg import build as build_sass

        def read_sass(text: str) -> None:
            for function in parse_sass(text).functions:
                build_sass(function)

        return read_sass
    if kind == "contract":
        from workbench.verify.contract import load_contract

        folder = Path(tempfile.mkdtemp())

        def read_contract(text: str) -> None:
            path = folder / "c.toml"
            path.write_text(text)
            load_contract(path)

        return read_contract
    if kind == "audit":
        from workbench.isa.ptx import parse
        from workbench.verify.contract import ContractKernel
        from workbench.verify.ordering.binding import Effects, neighbours
        from workbench.verify.ordering.static import (
            analyse_forms,
            audit_kernel,
            contract_launch,
            kernel_forms,
        )

        def read_and_judge(text: str) -> None:
            module = parse(text)
            for kernel in module.kernels[:1]:
                forms = kernel_forms(module, None, None, kernel.name, None)
                contract = (
                    None
                    if forms.block
                    else ContractKernel(name=kernel.name, grid=(4, 1, 1), block=(128, 1, 1))
                )
                launch = contract_launch(forms, contract)
                audit_kernel(analyse_forms(forms, launch), neighbours([launch], [Effects()], 0))

        return read_and_judge
    from workbench.memory_model import parse as parse_litmus

    return parse_litmus


def check(kind: str) -> Callable[[bytes], None]:
    """Return the function that is fuzzed: it keeps what raises an error that is not typed, and goes on."""
    from workbench.errors import WorkbenchError

    read = reader(kind)

    def one(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            read(text)
        except WorkbenchError:
            return
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{kind}-{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
            place = FOUND / name
            if not place.exists():
                FOUND.mkdir(parents=True, exist_ok=True)
                place.write_text(text)

    return one


def mutator(texts: list[str]) -> Callable[[bytes, int, int], bytes]:
    """Change tokens and lines, and mix in those of other seeds."""
    lines = [line for t in texts for line in t.splitlines()] or [""]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        text = data.decode("utf-8", "replace")
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.5:
                rows = text.splitlines() or [""]
                at = rng.randrange(len(rows))
                match rng.randrange(4):
                    case 0:
                        del rows[at]
                    case 1:
                        rows.insert(at, rng.choice(lines))
                    case 2:
                        rows.insert(at, rows[rng.randrange(len(rows))])
                    case _:
                        rows[at] = rng.choice(lines)
                text = "\n".join(rows)
            else:
                tokens = _TOKEN.findall(text) or [""]
                at = rng.randrange(len(tokens))
                match rng.randrange(4):
                    case 0:
                        del tokens[at]
                    case 1:
                        tokens[at] = rng.choice(_EXTREMES)
                    case 2:
                        tokens[at] = tokens[rng.randrange(len(tokens))]
                    case _:
                        tokens.insert(at, tokens[at] * rng.choice((1, 2, 200)))
                text = "".join(tokens)
        return text.encode("utf-8", "replace")[:max_size]

    return mutate


def sass_seeds() -> list[str]:
    """Disassemble some kernels of the test suite."""
    from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
    from workbench.compile.ptxas import assemble
    from workbench.errors import WorkbenchError
    from workbench.isa.sass import disassemble

    found = []
    for path in list(pairs())[:12]:
        text = path.read_text()
        target = re.search(r"\.target\s+(\w+)", text)
        try:
            cubin = assemble(text, target[1] if target else "", DEFAULT_PTXAS_FLAGS, Limits()).cubin
            found.append(disassemble(cubin))
        except WorkbenchError:
            continue
    return found


def fuzz(kind: str, seconds: int, folder: Path) -> None:
    """Run the fuzzer; does not return."""
    import atheris

    with atheris.instrument_imports(include=["workbench.isa", "workbench.memory_model", "workbench.verify"]):
        function = check(kind)
    texts = [p.read_text() for p in sorted(folder.glob("*"))]
    limits = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-timeout=20", "-rss_limit_mb=3000"]
    argv = [sys.argv[0], *limits, f"-artifact_prefix={FOUND}/{kind}-", str(folder)]
    atheris.Setup(argv, function, custom_mutator=mutator(texts))
    atheris.Fuzz()


def main() -> int:
    """Start the fuzzer in a child and say what it found."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind not in READERS:
        print(f"usage: readers.py {'|'.join(READERS)} [SECONDS]", file=sys.stderr)
        return 2
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    FOUND.mkdir(parents=True, exist_ok=True)
    before = set(FOUND.iterdir())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n, text in enumerate(seeds(kind) + (sass_seeds() if kind == "sass" else [])):
            (folder / f"seed{n}").write_text(text[:_LONGEST])
        child = [sys.executable, __file__, kind, str(seconds), "--child", name]
        status = subprocess.run(child, check=False).returncode
        inputs = len(list(folder.iterdir()))
    found = sorted(set(FOUND.iterdir()) - before)
    for path in found:
        print(path.relative_to(ROOT))
    print(f"{kind}: {seconds} s, {inputs} inputs in the corpus, {len(found)} errors that are not typed")
    return 1 if found or status else 0


if __name__ == "__main__":
    if "--child" in sys.argv:
        fuzz(sys.argv[1], int(sys.argv[2]), Path(sys.argv[-1]))
    sys.exit(main())
