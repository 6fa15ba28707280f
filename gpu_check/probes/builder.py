"""Puts kernels of a family together as one PTX module, and assembles it for sm_90a.

Each kernel takes the addresses of its inputs and of its own region of `out`. Its body finds the thread's
index in `%r0`, the global index in `%r1`, `%out` and `%<input>`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.family import Family, Part
from workbench.compile.ptxas import find_ptxas
from workbench.devices.launch import Launch, Parameter, Pointer
from workbench.devices.model import Bytes, Kernel, Slot
from workbench.errors import WorkbenchError

ARCH = "sm_90a"
_HEAD = f".version 9.2\n.target {ARCH}\n.address_size 64\n"
_REGISTERS = """.reg .pred %p<40>; .reg .b16 %h<80>; .reg .b32 %r<300>; .reg .f32 %f<80>; .reg .f64 %fd<20>;
.reg .b64 %d<80>;"""
_INDEX = """mov.u32 %r0, %tid.x;
mov.u32 %r298, %ctaid.x;
mov.u32 %r299, %ntid.x;
mad.lo.u32 %r1, %r298, %r299, %r0;"""
_ERROR_LINE = re.compile(r"line (\d+)")

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """One kernel and what it leaves."""

    text: str
    launch: Launch
    parts: tuple[Part, ...]
    covers: tuple[str, ...]


def normal(instruction: str) -> str:
    """An instruction with its modifiers in alphabetical order, as `Family.covers` has it."""
    opcode, *modifiers = instruction.split(".")
    return ".".join((opcode, *sorted(modifiers)))


def instructions_of(body: str) -> list[str]:
    """Opcodes with modifiers of a body."""
    found = []
    for line in re.split(r"[;\n]", body):
        text = re.sub(r"^\s*(?:@!?%\w+\s+)?", "", line.strip())
        text = re.sub(r"^[\w$]+:\s*", "", text)
        first = text.split(" ")[0]
        if re.match(r"^[a-z][\w]*(\.[\w:]+)*$", first):
            found.append(first)
    return found


@dataclass
class Builder:
    """Gathers entries of a family."""

    name: str
    doc: str
    inputs: dict[str, Bytes] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)
    """Inputs that kernels write as well; their content afterwards is compared."""
    entries: list[Entry] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Forms that ptxas does not take for the arch, by its words."""
    out_bytes: int = 0

    def give(self, name: str, array: Any, state: bool = False) -> str:
        """Add an input; returns its name."""
        self.inputs[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if state:
            self.state.add(name)
        return name

    def reserve(self, nbytes: int) -> int:
        """Offset of a new region of `out`, 256-byte aligned."""
        at = self.out_bytes
        self.out_bytes += -(-nbytes // 256) * 256
        return at

    def entry(
        self,
        form: str,
        body: str,
        takes: Sequence[str] = (),
        results: Sequence[tuple[str, int]] = (),
        *,
        names: Sequence[str] = (),
        grid: Triple = (1, 1, 1),
        block: int = 32,
        cluster: Triple = (1, 1, 1),
        smem: int = 0,
        variables: str = "",
        covers: Sequence[str] | None = None,
        part: dict[str, Any] | None = None,
        state: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Add a kernel.

        Args:
            form: what the report calls it.
            body: PTX statements.
            takes: inputs, whose addresses are `%<name>`.
            results: (format, elements) of the regions of `out`, whose addresses are `%out`, `%out1`, ...
            names: what the report calls the results where there are several.
            covers: the instructions it exercises; by default all of the body.
            part: more fields of its parts (`exact`, `bound`, ...).
            state: (input, format) of states that this kernel leaves for the comparison.
        """
        index = len(self.entries)
        kernel = f"k{index}"
        parameters = [Parameter(bytes(8), (Pointer(0, name),)) for name in takes]
        pointers = [f"%{name}" for name in takes]
        parts = []
        for n, (fmt, elements) in enumerate(results):
            nbytes = elements * {"u8": 1, "bf16": 2}.get(fmt, int(fmt[1:]) // 8 if fmt[1:].isdigit() else 0)
            at = self.reserve(nbytes)
            parameters.append(Parameter(bytes(8), (Pointer(0, "out", at),)))
            pointers.append(f"%out{n or ''}")
            label = names[n] if names else form
            parts.append(Part(label, "out", at, nbytes, fmt, **(part or {})))
        for name, fmt in state:
            parts.append(Part(f"{form}: {name}", name, 0, self.inputs[name].nbytes, fmt, **(part or {})))
        declared = ",\n".join(f".param .u64 p{n}" for n in range(len(pointers)))
        loads = "\n".join(f".reg .b64 {p}; ld.param.b64 {p}, [p{n}];" for n, p in enumerate(pointers))
        text = (
            f".visible .entry {kernel}(\n{declared}\n)\n{{\n{_REGISTERS}\n{variables}\n{loads}\n{_INDEX}\n"
            f"{body}\nret;\n}}\n"
        )
        used = tuple(covers) if covers is not None else tuple(instructions_of(body))
        launch = Launch(kernel, grid, (block, 1, 1), cluster, smem, parameters=tuple(parameters))
        self.entries.append(Entry(text, launch, tuple(parts), used))

    def family(self) -> Family:
        """Assemble; forms that the arch lacks are left out and stand in `dropped`.

        Raises:
            WorkbenchError: if ptxas refuses something that is no kernel's.
        """
        entries, ptx, cubin = self._assembled()
        slots = [
            Slot(n, d.nbytes, "state" if n in self.state else "activation") for n, d in self.inputs.items()
        ]
        if self.out_bytes:
            slots.append(Slot("out", self.out_bytes, "output"))
        kernel = Kernel(self.name, ARCH, tuple(e.launch for e in entries), tuple(slots), cubin, ptx)
        covers = sorted({normal(c) for e in entries for c in (*e.covers, "ld.param.b64", "ret")})
        parts = tuple(p for e in entries for p in e.parts)
        return Family(self.name, self.doc, kernel, self.inputs, parts, tuple(covers))

    def _assembled(self) -> tuple[list[Entry], str, bytes]:
        kept = list(self.entries)
        for _ in range(50):
            lines, text = [], _HEAD
            for e in kept:
                lines.append(text.count("\n") + 1)
                text += e.text
            cubin, log = _ptxas(text)
            if cubin is not None:
                return kept, text, cubin
            wrong: dict[int, str] = {}
            for line in log.splitlines():
                if found := _ERROR_LINE.search(line):
                    at = int(found.group(1))
                    number = max((i for i, first in enumerate(lines) if first <= at), default=-1)
                    if number >= 0:
                        wrong.setdefault(number, line.split(":", 1)[-1].strip())
            if not wrong:
                raise WorkbenchError(f"{self.name}: ptxas refuses the module: {log.strip()[:400]}")
            for number, why in wrong.items():
                for p in kept[number].parts:
                    self.dropped[p.name] = why
            kept = [e for i, e in enumerate(kept) if i not in wrong]
        raise WorkbenchError(f"{self.name}: ptxas goes on refusing kernels")


def _ptxas(text: str) -> tuple[bytes | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(text)
        done = subprocess.run(
            [find_ptxas(), f"-arch={ARCH}", "-o", target.name, source.name],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.defpath},
        )
        if done.returncode == 0:
            return target.read_bytes(), done.stderr
        return None, done.stdout + done.stderr
