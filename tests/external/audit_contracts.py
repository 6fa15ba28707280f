"""Contracts of the corpus's kernels: what each argument is for, by its sources; launches by its MLIR.

`write_contract(name)` binds made-up addresses to the arguments of a module, interprets its host function and
writes `contract.toml` beside its PTX: grid, block, cluster, PDL and the buffers that the parameters point to.
Sizes are left out, so that the audit is static: the data of such kernels cannot be made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus

from workbench.compile.launches import RawLaunch, interpret_launches

_STEP = 1 << 40


@dataclass(frozen=True)
class Use:
    """What an argument is for."""

    role: str
    settled: bool = False
    """Complete, and used by nobody else any more, before the kernel's predecessor started."""
    leads_to: str | None = None
    """Role of the memory that pointers or tensor maps in it lead to."""


WEIGHT, INPUT, STATE = Use("weight"), Use("activation"), Use("state")
OUTPUT, SCRATCH, FLAG, MAILBOX, METADATA = (
    Use(r) for r in ("output", "scratch", "flag", "mailbox", "metadata")
)
KEPT = Use("state", settled=True)
"""State that only this kernel of the layer uses: its last use was a decode step or several kernels ago."""
EARLY_OUTPUT = Use("output", settled=True)
"""An output whose readers were done before the predecessor started: the kernel writes it as soon as its
polled input is there."""
ARMED = Use("mailbox", settled=True)
"""Slots that their reader made ready again a layer ago or earlier: they are written without looking."""
HINTS = Use("scratch", settled=True)
"""Counters that make a poll likely to succeed; what guards the data is the data."""
MAPS = Use("weight", leads_to="weight")
PEERS = Use("metadata", leads_to="mailbox")
VALUE = None
"""A number; the contract does not fix it."""

_ROWS = (KEPT, KEPT, WEIGHT, WEIGHT, WEIGHT)
"""Prefix and saved blocks ("must be complete at launch"), norm, query and output norm."""

USES: dict[str, tuple[Use | None, ...]] = {
    "ClusterAttnRes": (INPUT, *_ROWS, EARLY_OUTPUT, VALUE, VALUE, EARLY_OUTPUT),
    "EmbeddingGather": (INPUT, WEIGHT, OUTPUT, VALUE, VALUE),
    "DenseSitu": (INPUT, OUTPUT, VALUE, VALUE),
    "L2Prefetch": (PEERS,),
    "KdaSplit": (
        INPUT, WEIGHT, WEIGHT, KEPT, INPUT, INPUT, WEIGHT, WEIGHT, METADATA, KEPT, OUTPUT, INPUT, WEIGHT,
        VALUE, VALUE, VALUE, WEIGHT, METADATA,
    ),
    "MlaQuery": (
        INPUT, WEIGHT, WEIGHT, WEIGHT, WEIGHT, STATE, METADATA, WEIGHT, WEIGHT, VALUE, OUTPUT, MAILBOX,
        MAILBOX, VALUE,
    ),
    "MlaValue": (INPUT, WEIGHT, INPUT, METADATA, OUTPUT),
    "DcpValue": (
        INPUT, INPUT, METADATA, MAILBOX, MAILBOX, PEERS, PEERS, MAILBOX, WEIGHT, INPUT, METADATA, OUTPUT,
        VALUE, VALUE,
    ),
    "OprojProducer": (INPUT, WEIGHT, MAILBOX, MAILBOX, VALUE),
    "OprojUmma": (INPUT, WEIGHT, MAILBOX, MAILBOX, VALUE),
    "OprojConsumer": (
        MAILBOX, *_ROWS, EARLY_OUTPUT, MAILBOX, HINTS, VALUE, VALUE, MAILBOX, MAILBOX, VALUE,
    ),
    "OprojFused": (
        INPUT, WEIGHT, MAILBOX, MAILBOX, VALUE, *_ROWS, EARLY_OUTPUT, MAILBOX, HINTS, VALUE, VALUE,
    ),
    "SplitKGemm": (WEIGHT, INPUT, OUTPUT, WEIGHT, Use("weight", leads_to="weight")),
    "CuteSkinnyGemm": (INPUT, WEIGHT, INPUT, OUTPUT),
    "WsGemm": (INPUT, WEIGHT, MAILBOX, MAILBOX, VALUE, VALUE, OUTPUT),
    "RouteSitu": (
        INPUT, WEIGHT, EARLY_OUTPUT, EARLY_OUTPUT, MAILBOX, EARLY_OUTPUT, INPUT, OUTPUT, VALUE, VALUE, VALUE,
        EARLY_OUTPUT,
    ),
    "ExpertsKernel": (
        INPUT, INPUT, MAPS, WEIGHT, WEIGHT, SCRATCH, OUTPUT, VALUE, VALUE, VALUE, VALUE, MAILBOX, VALUE,
        VALUE,
    ),
    "ExpertsGroupKernel": (INPUT, SCRATCH, VALUE),
    "ExpertsPlanKernel": (INPUT, OUTPUT),
    "SharedUmma": (INPUT, MAPS, OUTPUT, FLAG, PEERS, VALUE, VALUE, VALUE, VALUE, VALUE),
    "SharedDown": (INPUT, MAPS, PEERS, VALUE, VALUE, VALUE),
    "MoeTail": (
        MAILBOX, MAILBOX, MAPS, WEIGHT, INPUT, INPUT, INPUT, PEERS, MAILBOX, MAILBOX, MAILBOX, VALUE, VALUE,
        VALUE, VALUE, VALUE, VALUE, MAILBOX,
    ),
    "WaveMoeTail": (
        MAILBOX, MAILBOX, WEIGHT, WEIGHT, INPUT, INPUT, INPUT, PEERS, MAILBOX, MAILBOX, MAILBOX, VALUE, VALUE,
        VALUE, VALUE, VALUE, VALUE, MAILBOX,
    ),
    "method": (INPUT, PEERS, VALUE, VALUE, VALUE),
    "MoeFrontTP8": (
        WEIGHT, WEIGHT, MAILBOX, FLAG, MAILBOX, ARMED, ARMED, WEIGHT, MAILBOX, EARLY_OUTPUT, WEIGHT, ARMED,
        VALUE, VALUE, VALUE, MAILBOX, VALUE,
    ),
    "MoeFrontTP16": (
        WEIGHT, WEIGHT, MAILBOX, FLAG, MAILBOX, ARMED, ARMED, WEIGHT, MAILBOX, WEIGHT, ARMED, WEIGHT, ARMED,
        METADATA, VALUE, VALUE, VALUE, MAILBOX, VALUE, VALUE, VALUE, VALUE, VALUE,
    ),
    "MoeSharedTP8": (MAILBOX, WEIGHT, WEIGHT, MAILBOX, ARMED, VALUE, VALUE),
    "SharedSituTables": (OUTPUT, VALUE, VALUE),
    "ClusterExpertsTP8": (INPUT, MAILBOX, MAPS, WEIGHT, WEIGHT, ARMED, FLAG, VALUE, VALUE, VALUE),
    "ClusterExpertsTP16": (MAILBOX, MAILBOX, MAPS, WEIGHT, WEIGHT, ARMED, VALUE, VALUE, VALUE),
    "LamportCopy": (MAILBOX, EARLY_OUTPUT, VALUE),
    "_KdaSkinnyNGemm": (INPUT, WEIGHT, OUTPUT),
    "_KdaSkinnyKGemm": (INPUT, WEIGHT, OUTPUT),
    "FusedAddMulticastSkinnyGemm": (INPUT, WEIGHT, INPUT, MAILBOX),
    "KdaTcVerify": (
        INPUT, INPUT, INPUT, WEIGHT, WEIGHT, KEPT, KEPT, KEPT, OUTPUT, METADATA, METADATA, KEPT, WEIGHT,
        METADATA, FLAG, VALUE, VALUE,
    ),
    "KdaTcVerify2": (
        INPUT, INPUT, INPUT, WEIGHT, WEIGHT, KEPT, KEPT, KEPT, OUTPUT, METADATA, METADATA, KEPT, WEIGHT,
        METADATA, FLAG, VALUE, VALUE,
    ),
    "KdaCommit": (
        *(Use("metadata", leads_to="state"),) * 3, *(METADATA,) * 3, WEIGHT, WEIGHT, *(METADATA,) * 5, VALUE,
        VALUE,
    ),
}  # fmt: skip
"""By kernel class, in the order of the host function's arguments; the stream and what is None left out."""

NAMES: dict[str, str] = {
    "ClusterAttnRes": "delta prefix blocks norm query out_norm output - - aux",
    "KdaSplit": "x weights bias conv_state raw_gate beta a_log dt_bias slots state output gate norm - - - "
    "f_b accepted",
    "MlaQuery": "qkv w_qa w_kva w_qb w_uk cache slots q_scale k_scale - output mailbox mailbox_mc -",
    "MlaValue": "latent w_uv gate lengths output",
    "DcpValue": "rows rows_lse lens box lbox peers lpeers mailbox w_uv gate totals output - -",
    "OprojProducer": "x w mailbox mailbox_mc -",
    "OprojUmma": "x w mailbox mailbox_mc -",
    "OprojConsumer": "mailbox prefix blocks norm query out_norm output xmoe hints - - recv mailbox_mc -",
    "OprojFused": "x w mailbox mailbox_mc - prefix blocks norm query out_norm output xmoe hints - -",
    "SplitKGemm": "a b c bias a_map",
    "CuteSkinnyGemm": "a b residual c",
    "WsGemm": "x w mailbox mailbox_mc - - logits",
    "RouteSitu": "logits bias ids weights mailbox latent gate_up hidden - - - plan",
    "ExpertsKernel": "x ids maps w13_scales w2_scales workspace output - - - - mailbox_mc - -",
    "SharedUmma": "x maps hidden counters peers - - - - -",
    "MoeTail": "latent shared weight_map gamma gemm2 weights shared_output peers output latent_mc output_mc",
    "WaveMoeTail": "latent shared weight gamma gemm2 weights shared_output peers output latent_mc output_mc "
    "- - - - - - reduced",
    "MoeFrontTP8": "router bias xmoe epoch scores ids weights down latent latent_out gate_up hg - - - "
    "latent_mc",
    "MoeFrontTP16": "router bias xmoe epoch scores ids weights down latent gate_up hg shared_down output "
    "designated - - - latent_mc",
    "MoeSharedTP8": "xmoe down tables hg output",
    "ClusterExpertsTP8": "x ids maps w13_scales w2_scales output counter",
    "ClusterExpertsTP16": "x ids maps w13_scales w2_scales output",
    "LamportCopy": "mailbox output -",
    "FusedAddMulticastSkinnyGemm": "a b shared mailbox_mc",
    "KdaTcVerify": "qkv raw_g raw_beta a_log dt_bias state corr kg out query_start slots conv_state conv_w "
    "accepted counter",
    "KdaTcVerify2": "qkv raw_g raw_beta a_log dt_bias state corr kg out query_start slots conv_state conv_w "
    "accepted counter",
    "KdaCommit": "state_addrs corr_addrs kg_addrs state_strides corr_strides kg_strides a_log dt_bias "
    "sources commit_lens destinations boundaries boundary_lens",
}
FIXED = frozenset(("SplitKGemm",))
"""Classes whose dynamic extents the contract gives: how often their loops run depends on them."""
EXTENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "SplitKGemm": ((7168, 1536, 1, 1536), (8, 1536, 1, 1536), (7168, 8, 1, 7168), (7168, 8, 1, 7168)),
}
"""Dynamic extents and strides of the tensors, where not every one of them may be the same."""


def uses(kernel: str, name: str, argument: int) -> Use | None:
    """What an argument (counted without stream and None) of a kernel class is for, in one module."""
    use = USES[kernel][argument]
    if (
        kernel == "ClusterAttnRes"
        and argument == 0
        and ("ring" in name or "write" in name or "final" in name)
    ):
        return MAILBOX
    if kernel == "MoeTail" and argument in (4, 5, 6) and "poll" in name:
        return MAILBOX
    if kernel == "WaveMoeTail" and argument == 2 and _by_map(name):
        return MAPS
    if kernel in ("OprojProducer", "OprojUmma") and argument == 3 and _is_tensor(name, argument):
        return PEERS
    return use


def _by_map(name: str) -> bool:
    about = json.loads((corpus.folder() / name / "about.json").read_text())
    return bool(about["arguments"][2]["dtype"] == "Uint8")


def _is_tensor(name: str, argument: int) -> bool:
    about = json.loads((corpus.folder() / name / "about.json").read_text())
    return bool(about["arguments"][argument]["kind"] == "tensor")


@dataclass(frozen=True)
class _Bound:
    """One argument with the address that it was given, if it is one."""

    name: str
    use: Use | None
    address: int | None

    def holds(self, value: int) -> bool:
        """Whether a value is an address in it."""
        return self.address is not None and 0 <= value - self.address < _STEP // 2


def _arguments(name: str, about: dict[str, Any]) -> tuple[list[Sequence[int] | None], list[_Bound]]:
    """What the host function is given, and what that was."""
    kernel = about["kernel"]
    words = NAMES.get(kernel, "").split()
    given: list[Sequence[int] | None] = []
    bound: list[_Bound] = []
    n = 0  # over all but the stream, as the tables count
    tensors = 0
    for argument in about["arguments"]:
        if argument["kind"] == "stream":
            given.append(None)
            continue
        at, n = n, n + 1
        if argument["kind"] == "none":
            continue
        use = uses(kernel, name, at)
        label = words[at] if at < len(words) and words[at] != "-" else f"argument{at}"
        address = _STEP * (len(bound) + 1)
        if argument["kind"] == "scalar":
            given.append((address if use is not None else 1,))
            bound.append(_Bound(label, use, address if use is not None else None))
            continue
        dynamic = [s for s in (*argument["shape"], *argument["stride"]) if isinstance(s, str)]
        leaves = EXTENTS.get(kernel, ())
        extents = leaves[tensors][: len(dynamic)] if tensors < len(leaves) else (8,) * len(dynamic)
        tensors += 1
        given.append((address, *extents))
        bound.append(_Bound(label, use, address))
    if all(a["kind"] != "stream" for a in about["arguments"]):
        given.append(None)
    return given, bound


def launches_of(name: str) -> tuple[tuple[RawLaunch, ...], list[_Bound]]:
    """The launches of a module at made-up addresses, and what was bound to its arguments."""
    at = corpus.folder() / name
    about = json.loads((at / "about.json").read_text())
    given, bound = _arguments(name, about)
    return interpret_launches((at / "host.mlir").read_text(), about["function"], given), bound


def contract_text(name: str) -> str:
    """The contract of a module as TOML."""
    launches, bound = launches_of(name)
    fixed = json.loads((corpus.folder() / name / "about.json").read_text())["kernel"] in FIXED
    kernels = re.findall(r"\.entry\s+(\w+)", (corpus.folder() / name / "kernel.ptx").read_text())
    lines = [f"# {name}: roles by the package's sources, launch by its host function."]
    for launch in launches:
        assert launch.kernel in kernels, (launch.kernel, kernels)
        lines += ["[[kernel]]", f'name = "{launch.kernel}"']
        lines += [f"grid = {list(launch.grid)}", f"block = {list(launch.block)}"]
        lines += [f"cluster = {list(launch.cluster)}", f"pdl = {str(launch.pdl).lower()}"]
        lines += [f"smem_bytes = {launch.smem_bytes}"]
        for index, raw in enumerate(launch.params):
            pointers = set()
            for offset in range(0, len(raw) - 7, 8):
                value = int.from_bytes(raw[offset : offset + 8], "little")
                hit = next((b for b in bound if b.holds(value)), None)
                if hit is None or hit.use is None:
                    continue
                pointers.add(offset)
                lines += ["[[kernel.buffer]]", f"param = {index}", f"offset = {offset}"]
                lines += [f'name = "{hit.name}"', f'role = "{hit.use.role}"']
                lines += ["settled = true"] * hit.use.settled
                lines += [f'leads_to = "{hit.use.leads_to}"'] if hit.use.leads_to is not None else []
            for offset in range(0, len(raw) - 3, 4) if fixed and pointers else ():
                if offset & ~7 not in pointers:
                    value = int.from_bytes(raw[offset : offset + 4], "little")
                    lines += ["[[kernel.scalar]]", f"param = {index}", f"offset = {offset}", "bytes = 4"]
                    lines += [f"value = {value}"]
    return "\n".join(lines) + "\n"


def write_contract(name: str) -> Path:
    """Write a module's contract beside its PTX."""
    path = corpus.folder() / name / "contract.toml"
    text = contract_text(name)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


if __name__ == "__main__":
    import sys

    for module in sys.argv[1:]:
        print(contract_text(module))
