"""What the audit of one launch rests on: what nobody said and is taken for granted, and who made the code."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.artifact import Toolchain
from workbench.isa.cubin import Cubin
from workbench.isa.ptx import Module
from workbench.ops.model import Role
from workbench.verify.ordering.binding import Launch


def assumptions(launches: Sequence[Launch], target: str, has_ptx: bool = True) -> tuple[str, ...]:
    """What is assumed of the launches of a kernel, each thing once.

    Args:
        launches: as the contract or the artifact has them.
        target: architecture, such as `sm_103a`.
        has_ptx: the audit has the PTX too.
    """
    found = dict.fromkeys(text for launch in launches for text in _of(launch))
    if target.startswith("sm_103"):
        found["the device is a GB300: at most 160 multiprocessors, 228 KiB of shared memory each"] = None
    if not has_ptx:
        found[_SASS_ALONE] = None
    return tuple(found)


_SASS_ALONE = (
    "the SASS alone was audited, which shows no phases of mbarriers, no groups of copies, no reuse of shared "
    "memory and no races: give the PTX beside it for those"
)


def _of(launch: Launch) -> list[str]:
    found: list[str] = []
    if launch.pdl is None:
        found.append("nobody said how the kernel is launched: only what holds for any launch passes")
    elif launch.pdl:
        found.append(
            "what precedes the kernel in the stream may still run, and may use every buffer that is neither "
            "weight nor metadata"
        )
    else:
        found.append("the kernel starts when everything before it in the stream is complete")
    if len(launch.buffers) > 1:
        found.append("buffers do not overlap")
    if any(launch.roles.get(b) in (Role.FLAG, Role.MAILBOX) for b in launch.buffers):
        found.append(
            "flags, counters and locks are zero before the first launch, and nobody resets them for the next"
        )
    return found


def assembler(cubin: Cubin | None, module: Module | None) -> str | None:
    """Which ptxas made the SASS, with its options, and the PTX version; None if nothing says so."""
    parts = []
    if cubin is not None and cubin.assembler is not None:
        flags = f" ({cubin.assembler_flags})" if cubin.assembler_flags else ""
        parts.append(cubin.assembler + flags)
    if module is not None:
        parts.append("PTX {}.{}".format(*module.version))
    return ", ".join(parts) or None


def toolchain(made_by: Toolchain) -> str:
    """An artifact's toolchain on one line."""
    return (
        f"CuTe DSL {made_by.dsl} (CUDA {made_by.flavour}, PTX {made_by.ptx_isa}), "
        f"ptxas {made_by.ptxas} ({' '.join(made_by.ptxas_flags)})"
    )
