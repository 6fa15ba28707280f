"""Rule asm-ordering: inline assembly that touches memory or orders, without saying so to the compiler.

A lint on source text: Python (CuTe DSL) by its syntax tree, CUDA C++ and MLIR by their text; nothing is
imported or run. A block without side effects may be merged, moved or removed, and one without a memory
clobber promises nothing about the loads and stores around it.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from workbench.findings import Finding, Severity
from workbench.verify.ordering.rules.asm_cuda import cuda_blocks, mlir_blocks
from workbench.verify.ordering.rules.asm_python import Block, python_blocks

RULE = "asm-ordering"
_CUDA = frozenset((".cu", ".cuh", ".h", ".hpp", ".cpp", ".inl"))
_STATEMENT = re.compile(r"[;{}\n]")
_PREFIX = re.compile(r"^\s*(?:[\w$%?]+\s*:\s*)*(?:@!?[\w$%{}?]+\s+)?")
_OPCODE = re.compile(r"([a-z][\w]*(?:[.:][\w:?]+)*)")
_LOADS = frozenset(("ld", "ldu", "ldmatrix"))
_STORES = frozenset(("st", "stmatrix", "atom", "red", "multimem", "tensormap", "discard"))
_ORDERS = frozenset(
    ("fence", "membar", "bar", "barrier", "mbarrier", "griddepcontrol", "wgmma", "cp", "tcgen05")
)
_HARMLESS = re.compile(
    r"^(?:ld\.(?:param|const|local)|st\.(?:param|local)|cp\.async\.bulk\.prefetch|mbarrier\.pending)"
)
_STRONG = re.compile(r"\.(?:acquire|release|acq_rel|relaxed|volatile|mmio|sc)\b")
_SYNCHRONISES = re.compile(
    r"^(?:fence|membar|bar|barrier|griddepcontrol|mbarrier|wgmma\.(?:fence|commit_group|wait_group)|"
    r"cp\.async(?:\.bulk)?\.(?:commit_group|wait_group|wait_all)|"
    r"(?:ld|st|red|atom|multimem)\.(?:[\w:]+\.)*(?:acquire|release|acq_rel))\b"
)
"""What orders the accesses around it; copies and relaxed accesses do not, tcgen05 fences no ordinary "
"memory."""
_NOT = re.compile(r"\.relaxed\b|^mbarrier\.(?:init|inval)\b")
_WHAT = {"load": "loads from memory", "store": "writes memory", "order": "orders memory accesses"}


def audit_source(text: str, path: str) -> list[Finding]:
    """Lint the inline assembly of a source file.

    Args:
        text: the file's text.
        path: its name as it is to be shown; the suffix says what it is (`.py`, `.mlir`, CUDA otherwise).

    Returns:
        One finding a block: an error where the block has no side effects though it needs them, a warning
        where it orders memory without a memory clobber. Python that does not parse has none.
    """
    suffix = PurePath(path).suffix.lower()
    if suffix == ".py":
        blocks = python_blocks(text)
    elif suffix == ".mlir":
        blocks = mlir_blocks(text)
    else:
        blocks = cuda_blocks(text)
    found = (_judge(b, path) for b in blocks)
    return list(dict.fromkeys(f for f in found if f is not None))


def opcodes(assembly: str) -> list[str]:
    """The instructions of a block with their modifiers, as written."""
    found: list[str] = []
    for statement in _STATEMENT.split(re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly, flags=re.S)):
        rest = _PREFIX.sub("", statement, count=1)
        match = _OPCODE.match(rest)
        if match is not None:
            found.append(match[1])
    return found


def effect(instruction: str) -> str | None:
    """`load`, `store` or `order` for an instruction that must not be moved freely; None for others.

    A load of read-only data (`.nc`) may be pure: whether the data is read-only is decided on the kernel.
    """
    if _HARMLESS.match(instruction):
        return None
    opcode = instruction.split(".")[0]
    if opcode in _LOADS:
        if _STRONG.search(instruction):
            return "order"
        return None if ".nc" in instruction else "load"
    if opcode in _STORES:
        return "order" if _STRONG.search(instruction) else "store"
    return "order" if opcode in _ORDERS else None


def _judge(block: Block, path: str) -> Finding | None:
    found = [(i, e) for i in opcodes(block.assembly) if (e := effect(i)) is not None]
    if not found:
        return None
    source = f"{path}:{block.line}"
    worst = next((f for f in found if f[1] == "order"), found[0])
    if block.side_effects is False:
        how = (
            "has_side_effects=True and the clobber ~{memory}"
            if block.language != "cuda"
            else 'asm volatile and the clobber "memory"'
        )
        return Finding(
            rule=RULE,
            severity=Severity.ERROR,
            message=(
                f"the inline assembly with {worst[0]} {_WHAT[worst[1]]}, but is declared to have no side "
                "effects: the compiler may merge two of them, move it over the barrier or wait that orders "
                "it, "
                "or remove it"
            ),
            fix=f"declare it with {how}; only a load of data that nothing writes may be without",
            source=source,
        )
    clobbers = block.clobbers_memory
    orders = [i for i, _ in found if _SYNCHRONISES.match(i) and not _NOT.search(i)]
    if block.side_effects and clobbers is False and orders:
        return Finding(
            rule=RULE,
            severity=Severity.WARNING,
            message=(
                f"the inline assembly with {orders[0]} orders memory accesses, but has no memory clobber: "
                "nothing tells the compiler to keep the loads and stores around it on their sides"
            ),
            fix=(
                'add "memory" to its clobbers'
                if block.language == "cuda"
                else "add ~{memory} to its constraints"
            ),
            source=source,
        )
    return None
