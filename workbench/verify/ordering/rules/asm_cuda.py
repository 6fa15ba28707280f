"""Inline assembly in CUDA C++ and in MLIR, found in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from workbench.verify.ordering.rules.asm_python import Block

_SKIP = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|R"(\w*)\((?:.*?)\)\1"', re.S)
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b(\s*(?:volatile|__volatile__|__volatile)\b)?\s*\(")
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"', re.S)
_MLIR = re.compile(
    r"llvm\.inline_asm\s+(?P<flags>(?:(?:has_side_effects|is_align_stack|tail_call_kind\s*=\s*<\w+>|"
    r"asm_dialect\s*=\s*\w+|operand_attrs\s*=\s*\[[^\]]*\])\s+)*)"
    r'"(?P<asm>(?:\\.|[^"\\])*)"\s*,\s*"(?P<constraints>(?:\\.|[^"\\])*)"'
)


def cuda_blocks(text: str) -> list[Block]:
    """The `asm` statements of CUDA C++ source; comments do not count."""
    return list(_cuda(_without_comments(text)))


def _without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return re.sub(r"[^\n]", " ", found) if found.startswith("/") else found

    return _SKIP.sub(blank, text)


def _cuda(text: str) -> Iterator[Block]:
    for match in _ASM.finditer(text):
        sections = _sections(text, match.end())
        if sections is None:
            continue
        assembly = _literals(sections[0])
        outputs = sections[1].strip() if len(sections) > 1 else ""
        clobbers = _literals(sections[3]) if len(sections) > 3 else ""
        line = text.count("\n", 0, match.start()) + 1
        yield Block(assembly, line, match[1] is not None or not outputs, "memory" in clobbers, "cuda")


def _sections(text: str, start: int) -> list[str] | None:
    """The parts of an asm statement between its colons, up to the closing parenthesis."""
    found: list[str] = [""]
    depth, at = 1, start
    while at < len(text):
        c = text[at]
        if c == '"':
            match = _STRING.match(text, at)
            if match is None:
                return None
            found[-1] += match[0]
            at = match.end()
            continue
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return found
        if c == ":" and depth == 1:
            if text.startswith("::", at) and at > start and (text[at - 1].isalnum() or text[at - 1] == "_"):
                at += 2  # a qualified name
                continue
            found.append("")
        else:
            found[-1] += c
        at += 1
    return None


def _literals(text: str) -> str:
    """The string literals of a piece of source, joined."""
    joined = "".join(m[1] for m in _STRING.finditer(text))
    return joined.replace("\\n", "\n").replace("\\t", " ")


def mlir_blocks(text: str) -> list[Block]:
    """The `llvm.inline_asm` operations of MLIR in its pretty form."""
    return [
        Block(
            m["asm"].replace("\\0A", "\n").replace("\\09", " ").replace("\\n", "\n"),
            text.count("\n", 0, m.start()) + 1,
            "has_side_effects" in m["flags"],
            "memory" in m["constraints"],
            "mlir",
        )
        for m in _MLIR.finditer(text)
    ]
