"""Auditing files: a PTX, a cubin, or both beside each other, with a contract."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workbench.errors import ContentError, MissingToolError, WorkbenchError
from workbench.findings import Finding, Severity
from workbench.isa.cubin import Cubin, read_cubin
from workbench.isa.ptx import Module, PtxSyntaxError, parse
from workbench.isa.sass import SassModule, disassemble, parse_sass
from workbench.verify.contract import Contract, ContractKernel, load_contract
from workbench.verify.ordering.binding import Effects, Launch, neighbours
from workbench.verify.ordering.joining import joined, run_contract
from workbench.verify.ordering.joining import premises as runs_rest_on
from workbench.verify.ordering.premises import assembler, assumptions
from workbench.verify.ordering.static import (
    Forms,
    KernelAudit,
    analyse_forms,
    audit_chain,
    audit_kernel,
    contract_launch,
    kernel_forms,
    together,
)
from workbench.verify.report import Verdict


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class AuditFinding(_Document):
    """One finding, as `audit --json` prints it."""

    rule: str
    severity: Severity
    ptx_line: int | None
    sass_offset: int | None
    source: str | None
    buffer: str | None
    message: str
    fix: str
    count: int = 1
    """How many instructions it was seen at."""


class Coverage(_Document):
    """How many accesses were looked at, decided, and left undecided."""

    accesses: int
    proved: int
    unknown: int


class AuditTarget(_Document):
    """The audit of one kernel."""

    target: str
    """The file, as given."""
    kernel: str
    arch: str
    verdict: Verdict
    findings: tuple[AuditFinding, ...]
    coverage: Coverage
    toolchain: str | None = None
    """What made the code, with its options, where the code says so."""
    assumptions: tuple[str, ...] = ()
    """What the verdict rests on besides the code."""


class Unreadable(_Document):
    """A file of a folder that could not be audited."""

    target: str
    message: str


class AuditDocument(_Document):
    """What `audit --json` prints."""

    targets: tuple[AuditTarget, ...]
    unreadable: tuple[Unreadable, ...] = ()
    """Files of a folder that could not be audited."""

    def only(self, kernels: Collection[str]) -> AuditDocument:
        """The document with the targets of these kernels alone."""
        return self.model_copy(update={"targets": tuple(t for t in self.targets if t.kernel in kernels)})

    @property
    def verdict(self) -> Verdict:
        """Fail if any kernel fails, else unknown if any is unknown or there is none, else pass."""
        verdicts = {t.verdict for t in self.targets}
        if Verdict.FAIL in verdicts:
            return Verdict.FAIL
        return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.UNKNOWN


def audit_file(path: Path, contract_path: Path | None = None) -> AuditDocument:
    """Audit every kernel of a `.ptx` or `.cubin` file.

    A sibling of the same stem and the other suffix is audited together with it; a PTX without one is
    assembled if ptxas is installed. A kernel the contract does not mention, or every kernel if there is none,
    is audited with nothing assumed of its launch, so that only what holds for any launch passes.

    Raises:
        ContentError: if a file cannot be read or used; names it.
        UnknownNameError: if the contract names a kernel the file does not have.
    """
    contract = load_contract(contract_path) if contract_path is not None else None
    module, cubin, sass, missing = _read(path)
    names = [k.name for k in module.kernels] if module is not None else list(cubin.kernels if cubin else ())
    if not names:
        raise ContentError(path, "has no kernel")
    if contract is not None and contract_path is not None:
        contract.check(contract_path, names)
    arch = module.target if module is not None else (sass.target if sass is not None else "")
    try:
        audits = _audits(names, contract, lambda name: kernel_forms(module, sass, cubin, name, missing))
    except PtxSyntaxError:
        raise
    except WorkbenchError as e:
        raise ContentError(contract_path or path, str(e)) from e

    def bind(entry: ContractKernel, name: str) -> Launch:
        return contract_launch(kernel_forms(module, sass, cubin, name, missing), entry)

    ran = run_contract(module, contract, cubin, bind)
    targets = []
    for name in names:
        mentioned = contract is not None and contract.find(name, len(names)) is not None
        launches = [launch for launch, _ in audits[name]]
        premises = (
            *assumptions(launches, arch, module is not None),
            *(runs_rest_on(ran) if mentioned else ()),
        )
        audit = joined(together([a for _, a in audits[name]]), ran)
        targets.append(target_of(str(path), name, arch, audit, assembler(cubin, module), premises))
    return AuditDocument(targets=tuple(targets))


def _audits(
    names: Sequence[str], contract: Contract | None, forms_of: Callable[[str], Forms]
) -> dict[str, list[tuple[Launch, KernelAudit]]]:
    """The launches of each kernel with their audits: those of the contract are one chain, in its order."""
    entries = contract.kernel if contract is not None else ()
    listed = [(k.name or names[0], k) for k in entries]
    forms = {name: forms_of(name) for name in names}
    chain = [contract_launch(forms[name], entry) for name, entry in listed]
    audits = audit_chain([forms[name] for name, _ in listed], chain, literal=True)
    found: dict[str, list[tuple[Launch, KernelAudit]]] = {name: [] for name in names}
    for (name, _), launch, audit in zip(listed, chain, audits, strict=True):
        found[name].append((launch, audit))
    for name in names:
        if not found[name]:
            launch = contract_launch(forms[name], None)
            near = neighbours([launch], [Effects()], 0)
            found[name].append((launch, audit_kernel(analyse_forms(forms[name], launch), near)))
    return found


def _read(path: Path) -> tuple[Module | None, Cubin | None, SassModule | None, str | None]:
    """The PTX, the cubin and its SASS, and why there is no SASS if there is none."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise ContentError(path, "there is no such file or folder")
    if suffix not in (".ptx", ".cubin"):
        raise ContentError(path, "is neither a .ptx nor a .cubin file")
    ptx_path, cubin_path = path.with_suffix(".ptx"), path.with_suffix(".cubin")
    ptx_path = path if suffix == ".ptx" else ptx_path
    cubin_path = path if suffix == ".cubin" else cubin_path
    text = _text(ptx_path) if suffix == ".ptx" or ptx_path.is_file() else None
    data = _bytes(cubin_path) if suffix == ".cubin" or cubin_path.is_file() else None
    module: Module | None = None
    missing: str | None = None
    if text is not None:
        try:
            module = parse(text)
        except PtxSyntaxError as e:
            raise ContentError(ptx_path, str(e)) from e
        if data is None:
            data, missing = _assemble(text, module, ptx_path)
    cubin: Cubin | None = None
    sass: SassModule | None = None
    if data is not None:
        try:
            cubin = read_cubin(data)
            sass = parse_sass(disassemble(data))
        except MissingToolError as e:
            missing = str(e)
        except WorkbenchError as e:
            raise ContentError(cubin_path, str(e)) from e
    if module is not None and sass is not None and _sm(module.target) != _sm(sass.target):
        raise ContentError(cubin_path, f"is for {sass.target}, the PTX beside it for {module.target}")
    if module is None and sass is None:
        raise ContentError(path, missing or "has no code")
    return module, cubin, sass, missing


def _sm(target: str) -> str:
    return "".join(c for c in target.removeprefix("sm_") if c.isdigit())


def _assemble(text: str, module: Module, path: Path) -> tuple[bytes | None, str | None]:
    from workbench.compile import DEFAULT_PTXAS_FLAGS, CompileError, Limits
    from workbench.compile.ptxas import assemble

    try:
        return assemble(text, module.target, DEFAULT_PTXAS_FLAGS, Limits()).cubin, None
    except MissingToolError as e:
        return None, str(e)
    except CompileError as e:
        raise ContentError(path, str(e)) from e


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as e:
        raise ContentError(path, "is not a text file") from e
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror}") from e


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror}") from e


def target_of(
    path: str,
    name: str,
    arch: str,
    audit: KernelAudit,
    toolchain: str | None = None,
    assumptions: Sequence[str] = (),
) -> AuditTarget:
    """The audit of one kernel as a target of a document."""
    return AuditTarget(
        target=path,
        kernel=name,
        arch=arch,
        verdict=audit.verdict,
        findings=tuple(_finding(f) for f in audit.findings),
        coverage=Coverage(accesses=audit.accesses, proved=audit.proved, unknown=audit.unknown),
        toolchain=toolchain,
        assumptions=tuple(assumptions),
    )


def _finding(f: Finding) -> AuditFinding:
    return AuditFinding(
        rule=f.rule,
        severity=f.severity,
        ptx_line=f.ptx_line,
        sass_offset=f.sass_offset,
        source=f.source,
        buffer=f.buffer,
        message=f.message,
        fix=f.fix,
        count=f.count,
    )
