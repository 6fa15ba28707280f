"""Pairs of a wrong kernel and its right twin, one rule each: found beside this file and in docs/rules.

A pair is `pairs/<rule>/<name>.{wrong,right}.{ptx,cu,py}` with `<name>.toml` as the contract of both (left out
where the audit is to work without one). The wrong file's first line says by which stage it must be found:
`// found by: static`, `dynamic` or both. A page `docs/rules/<rule>.md` holds pairs as fenced blocks:
```` ```ptx wrong ````, ```` ```ptx right ```` and ```` ```toml contract ````; its table gives the severity.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workbench.findings import Severity

ROOT = Path(__file__).resolve().parents[3]
PAIRS = Path(__file__).parent / "pairs"
PAGES = ROOT / "docs" / "rules"
SUFFIXES = (".ptx", ".cu", ".py")
STAGES = ("static", "dynamic")
_SUFFIX_OF = {"python": ".py", "cuda": ".cu"}

_FOUND_BY = re.compile(r"^(?://|#) found by: (static|dynamic|static, dynamic)$")
_BLOCK = re.compile(r"^```(\w+) (wrong|right|contract)\n(.*?)^```$", re.M | re.S)
_SEVERITY = re.compile(r"^\| severity \| ([\w ,]+?) \|", re.M)


@dataclass(frozen=True)
class Source:
    """One kernel file: `path` is None for a block of a page."""

    suffix: str
    text: str
    path: Path | None = None


@dataclass(frozen=True)
class Pair:
    """One kind of source of a wrong kernel and of its right twin."""

    rule: str
    name: str
    wrong: Source
    right: Source
    contract: str | None

    @property
    def id(self) -> str:
        return f"{self.rule}-{self.name}{self.wrong.suffix}"

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages that must find the wrong kernel."""
        first = self.wrong.text.splitlines()[0].strip() if self.wrong.text else ""
        match = _FOUND_BY.match(first)
        if match is None:
            raise ValueError(f"{self.id}: the wrong kernel's first line is no `found by` line: {first!r}")
        return tuple(match[1].split(", "))


@cache
def pairs() -> tuple[Pair, ...]:
    """All pairs: of the folders, then of the pages."""
    of_folders = (p for folder in _folders() for p in _of_folder(folder))
    return (*of_folders, *(p for page in pages() for p in _of_page(page)))


@cache
def pages() -> tuple[Path, ...]:
    return tuple(sorted(p for p in PAGES.glob("*.md") if p.stem != "README"))


def severities(rule: str) -> tuple[Severity, ...]:
    """What the rule's page says that its findings may be; an error where there is no page."""
    page = PAGES / f"{rule}.md"
    match = _SEVERITY.search(page.read_text()) if page.is_file() else None
    return tuple(Severity(s) for s in match[1].split(", ")) if match is not None else (Severity.ERROR,)


def unmatched() -> list[str]:
    """Files in the folders of pairs that belong to no pair."""
    used = {s.path for p in pairs() for s in (p.wrong, p.right)}
    names = {(p.rule, p.name) for p in pairs()}
    return [
        str(f.relative_to(PAIRS))
        for f in sorted(PAIRS.rglob("*"))
        if f.is_file()
        and f.suffix != ".pyc"
        and f not in used
        and not (f.suffix == ".toml" and (f.parent.name, f.stem) in names)
    ]


def _folders() -> list[Path]:
    return sorted(p for p in PAIRS.glob("*") if p.is_dir() and p.name != "__pycache__")


def _of_folder(folder: Path) -> list[Pair]:
    found = []
    for wrong in sorted(folder.glob("*.wrong.*")):
        name = wrong.name.split(".wrong.")[0]
        right = folder / f"{name}.right{wrong.suffix}"
        if wrong.suffix not in SUFFIXES or not right.is_file():
            continue
        toml = folder / f"{name}.toml"
        found.append(
            Pair(
                folder.name,
                name,
                Source(wrong.suffix, wrong.read_text(), wrong),
                Source(right.suffix, right.read_text(), right),
                toml.read_text() if toml.is_file() else None,
            )
        )
    return found


def _of_page(page: Path) -> list[Pair]:
    """Pairs of a page in order: each `wrong` block opens one; a contract holds until the next one."""
    found: list[Pair] = []
    contract: str | None = None
    wrong: Source | None = None
    for language, kind, text in _BLOCK.findall(page.read_text()):
        if kind == "contract":
            contract = text
        elif kind == "wrong":
            wrong = Source(_SUFFIX_OF.get(language, f".{language}"), text)
        elif wrong is not None:
            found.append(
                Pair(page.stem, f"page{len(found) + 1}", wrong, Source(wrong.suffix, text), contract)
            )
            wrong = None
    return found


# -- nvcc ------------------------------------------------------------------------------------------


@cache
def nvcc() -> str | None:
    """The nvcc of the installed packages or of the path; None without a host compiler, its preprocessor."""
    from workbench.compile.ptxas import find_ptxas

    beside = Path(find_ptxas()).with_name("nvcc")
    found = str(beside) if beside.is_file() else shutil.which("nvcc")
    return found if found is not None and shutil.which("gcc") is not None else None


def to_ptx(text: str, folder: Path, arch: str = "sm_103a") -> str:
    """PTX of a CUDA source; an `// arch: sm_90a` line in it says another target."""
    if match := re.search(r"^// arch: (sm_\w+)$", text, re.M):
        arch = match[1]
    source = folder / "k.cu"
    source.write_text(text)
    tool = nvcc()
    assert tool is not None
    command = [tool, "-ptx", "-std=c++17", "-lineinfo", f"-arch={arch}", "-o", "k.made.ptx", "k.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return (folder / "k.made.ptx").read_text()


# -- the index of the pages ------------------------------------------------------------------------


def index() -> str:
    """What docs/rules/README.md says: each page, its severity, how it is found, and its first sentence."""
    rows = ["| rule | severity | found by | what goes wrong |", "|---|---|---|---|"]
    for page in pages():
        text = page.read_text()
        cells = {m[1]: m[2] for m in re.finditer(r"^\| (severity|found by) \| (.+?) \|$", text, re.M)}
        first = text.split("\n\n")[1].replace("\n", " ")
        rows.append(f"| [{page.stem}]({page.name}) | {cells['severity']} | {cells['found by']} | {first} |")
    return _INDEX + "\n".join(rows) + "\n"


_INDEX = """# Rules of the ordering audit

One page a rule: what goes wrong, how it is found, a wrong kernel with its right twin, the fix, and what the
rule rests on. The kernels are tests: `tests/verify/ordering/test_pairs.py` audits each of them. The PTX is
what the audit follows and executes; the SASS is what runs, so that a claim about order is made there; the
simulator runs the kernel under schedules that try to break it, where the contract says enough.

"""

if __name__ == "__main__":
    (PAGES / "README.md").write_text(index())
