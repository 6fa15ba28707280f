"""Machine descriptions: what a GPU can do, each figure with its source, read from `machines/*.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.artifact import stable_hash
from workbench.errors import ContentError, UnknownNameError
from workbench.files import parse_toml

_FOLDER = Path(__file__).parent / "machines"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Chip(_Section):
    """Sizes, clocks and bandwidths."""

    sms: int = Field(gt=0)
    clock_ghz: float = Field(gt=0)
    """SM clock under load."""
    hbm_tb_s: float = Field(gt=0)
    """Peak memory bandwidth, 10^12 bytes a second."""
    hbm_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that a read stream reaches."""
    hbm_mib: float = Field(gt=0)
    l2_mib: float = Field(gt=0)
    l2_tb_s: float = Field(gt=0)
    sm_l2_bytes_per_cycle: float = Field(gt=0)
    """What one SM can take from L2."""


class Limits(_Section):
    """Resources of one SM and their allocation units."""

    registers_per_sm: int = Field(gt=0)
    register_unit: int = Field(gt=0)
    """Registers are allocated to a warp in multiples of this."""
    subpartitions: int = Field(gt=0)
    max_registers_per_thread: int = Field(gt=0)
    smem_per_sm: int = Field(gt=0)
    """Bytes."""
    smem_per_cta: int = Field(gt=0)
    """Bytes of static and dynamic shared memory a CTA may ask for."""
    smem_reserved: int = Field(ge=0)
    """Bytes the system takes for each CTA."""
    smem_unit: int = Field(gt=0)
    max_warps: int = Field(gt=0)
    max_ctas: int = Field(gt=0)
    max_threads_per_cta: int = Field(gt=0)


class Latency(_Section):
    """Cycles until a dependent instruction may issue."""

    dram: float = Field(gt=0)
    l2: float = Field(gt=0)
    shared: float = Field(gt=0)
    alu: float = Field(gt=0)
    sfu: float = Field(gt=0)
    shuffle: float = Field(gt=0)
    barrier: float = Field(gt=0)
    fence: float = Field(gt=0)
    tensor: float = Field(gt=0)


class Launch(_Section):
    """Microseconds around kernels inside a CUDA graph."""

    first: float = Field(ge=0)
    """Start and end of a lone kernel."""
    gap: float = Field(ge=0)
    """Between a kernel and its dependent."""
    pdl_gap: float = Field(ge=0)
    """The same with programmatic dependent launch."""


class Parallelism(_Section):
    """How much memory traffic can be under way."""

    sm_bytes_in_flight: float = Field(gt=0)


class Machine(_Section):
    """One GPU model. `sources` names where each figure comes from, by `section.figure`."""

    name: str
    title: str
    arches: tuple[str, ...]
    """Targets that run on it."""
    chip: Chip
    limits: Limits
    latency_cycles: Latency
    issue_rate: dict[str, float]
    """Warp instructions a cycle and SM, by class of `Counters`; `total` is the schedulers' limit."""
    peak_tflops: dict[str, float]
    memory_parallelism: Parallelism
    launch_us: Launch
    sources: dict[str, str]

    @property
    def hash(self) -> str:
        """Hash of the figures: part of the premises of a prediction."""
        return stable_hash(self.model_dump(mode="json", exclude={"sources", "title"}))

    def microseconds(self, cycles: float) -> float:
        """SM cycles in microseconds."""
        return cycles / (self.chip.clock_ghz * 1e3)

    def estimates(self) -> tuple[str, ...]:
        """Figures that are estimated rather than published or measured."""
        return tuple(sorted(k for k, s in self.sources.items() if s.startswith("estimate")))


def machine_names() -> list[str]:
    """Names of the machines that come with the workbench."""
    return sorted(p.stem for p in _FOLDER.glob("*.toml"))


def load_machine(name: str | Path) -> Machine:
    """Load a machine by name, or from a TOML file (a path, or a string that ends in `.toml`).

    Raises:
        UnknownNameError: if there is no machine of that name; lists the nearest.
        ContentError: if the file cannot be read, is no TOML, lacks a figure or gives one without a source.
    """
    path = Path(name)
    if isinstance(name, str) and path.suffix != ".toml":
        path = machine_file(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ContentError(path, f"cannot be read: {e}") from e
    return parse_machine(text, path)


def machine_file(name: str) -> Path:
    """The file of a machine that comes with the workbench; raises UnknownNameError."""
    if name not in machine_names():
        raise UnknownNameError("machine", name, machine_names())
    return _FOLDER / f"{name}.toml"


def parse_machine(text: str, path: Path) -> Machine:
    """A machine from its description; `path` names it in errors. Raises ContentError."""
    document = parse_toml(text, path)
    sources: dict[str, str] = {}
    plain = {k: _section(path, k, v, sources) for k, v in document.items()}
    try:
        machine = Machine.model_validate({**plain, "sources": sources})
    except ValidationError as e:
        first = e.errors()[0]
        raise ContentError(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from e
    if "total" not in machine.issue_rate or "other" not in machine.issue_rate:
        raise ContentError(path, "issue_rate: lacks `total` or `other`")
    if any(rate <= 0 for rate in (*machine.issue_rate.values(), *machine.peak_tflops.values())):
        raise ContentError(path, "rates and peaks must be positive")
    return machine


def machine_for(arch: str) -> Machine:
    """The machine that stands for an architecture (`sm_103a` -> GB300).

    Raises:
        UnknownNameError: if no machine lists it.
    """
    machines = [load_machine(n) for n in machine_names()]
    for m in machines:
        if arch in m.arches:
            return m
    raise UnknownNameError("machine for architecture", arch, [a for m in machines for a in m.arches])


def _section(path: Path, name: str, value: Any, sources: dict[str, str]) -> Any:
    if not isinstance(value, dict):
        return value
    plain = {}
    for figure, entry in value.items():
        if not (isinstance(entry, dict) and entry.keys() == {"value", "source"} and entry["source"]):
            raise ContentError(path, f'{name}.{figure}: must be {{ value = ..., source = "..." }}')
        plain[figure], sources[f"{name}.{figure}"] = entry["value"], str(entry["source"])
    return plain
