"""Auditing a Python file with CuTe DSL kernels: every launch of every host function, compiled here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.artifact import Artifact, Launch
from workbench.compile import ArtifactCache, CompileError, compile_candidate
from workbench.compile.child import SOURCE_NAME
from workbench.compile.plain import (
    Argument,
    PlainFile,
    TensorArgument,
    choose_hosts,
    read_plain,
    with_arguments,
)
from workbench.compile.request import ARCHITECTURES
from workbench.errors import ContentError, UnknownNameError
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.verify.contract import Contract, ContractKernel, load_contract
from workbench.verify.ordering.files import AuditDocument
from workbench.verify.ordering.launches import audit_launches
from workbench.verify.ordering.lint import linted

_DEFAULT_DTYPE = DType.F32


@dataclass(frozen=True)
class AuditedHost:
    """One host function of a file: its audit and the code that the findings point into."""

    document: AuditDocument
    artifact: Artifact


def audit_python(
    path: Path,
    contract_path: Path | None = None,
    *,
    name: str | None = None,
    arch: str = ARCHITECTURES[0],
    cache: ArtifactCache | None = None,
) -> list[AuditedHost]:
    """Compile every host function of a file in the sandbox and audit all its launches.

    Args:
        path: the file.
        contract_path: says what the file does not: `[[argument]]` entries, or `[[kernel.buffer]]` entries
            whose names are arguments; roles and `pdl` by kernel.
        name: of one host function or kernel; all of them if left out.
        arch: target of the compiler.
        cache: of artifacts.

    Raises:
        ContentError: if the file or the contract cannot be used, or the file does not compile.
        UnknownNameError: for an unknown name or arch, or a contract that names a kernel which is not there.
    """
    plain = read_plain(path)
    hosts, kernel = choose_hosts(plain, name)
    contract = load_contract(contract_path) if contract_path is not None else None
    assumed: list[str] = []
    if contract is not None:
        plain = with_arguments(plain, _arguments(plain, contract, assumed))
    found = []
    for host in hosts:
        request = plain.request(host, arch)
        try:
            artifact = compile_candidate(request, cache, default_stream=True)
        except CompileError as e:
            line = e.line if e.line is not None and e.line <= plain.source.count("\n") + 1 else None
            raise ContentError(path, f"{e.kind}: {e.message}", line) from e
        if contract is not None and contract_path is not None:
            artifact = _as_the_contract_says(artifact, contract, contract_path, plain)
        roles: dict[str, Role | None] = dict.fromkeys(plain.untold)
        if contract is not None:
            roles |= _roles(artifact, contract)
        document = audit_launches(artifact, str(path), roles, assumed)
        if kernel is not None:
            document = document.only([launch.kernel for launch in artifact.launches if _is(launch, kernel)])
        if document.targets:
            document = linted(_placed(document, path.name), plain.source, path.name)
            found.append(AuditedHost(document, artifact))
    if not found and kernel is not None:
        raise ContentError(path, f"its host functions do not launch the kernel {kernel!r}")
    return found


def _arguments(plain: PlainFile, contract: Contract, assumed: list[str]) -> dict[str, Argument]:
    """What a contract says of the arguments: by `[[argument]]`, else by buffers that carry their names."""
    found: dict[str, Argument] = {}
    for k in contract.kernel:
        for b in k.buffer:
            for host in plain.hosts:
                known = b.name in (*host.parameters, *host.optional)
                if not known or b.name in plain.arguments or b.bytes is None:
                    continue
                shape = (max(1, b.bytes * 8 // _DEFAULT_DTYPE.bits),)
                found[b.name] = TensorArgument(shape=shape, dtype=_DEFAULT_DTYPE, role=b.role, align=b.align)
                words = f"{b.name} is a one-dimensional {_DEFAULT_DTYPE} tensor, as nothing says more of it"
                if words not in assumed:
                    assumed.append(words)
    for a in contract.argument:
        found[a.name] = (
            a.value
            if a.value is not None
            else TensorArgument(shape=a.shape, dtype=a.dtype, role=a.role, align=a.align, zeroed=a.zeroed)
        )
    return found


def _placed(document: AuditDocument, name: str) -> AuditDocument:
    """The document with the file's own name for what the compiler calls the candidate."""

    def place(source: str | None) -> str | None:
        if source is None or not source.startswith(f"{SOURCE_NAME}:"):
            return source
        return name + source.removeprefix(SOURCE_NAME)

    targets = tuple(
        t.model_copy(
            update={"findings": tuple(f.model_copy(update={"source": place(f.source)}) for f in t.findings)}
        )
        for t in document.targets
    )
    return document.model_copy(update={"targets": targets})


def _is(launch: Launch, kernel: str) -> bool:
    """True if a launch is of the kernel function of this name; the DSL puts the name into the entry's."""
    return launch.kernel == kernel or f"_{kernel}_" in f"_{launch.kernel.removeprefix('kernel_cutlass_')}"


def _entries(launch: Launch, contract: Contract) -> list[ContractKernel]:
    return [k for k in contract.kernel if k.name is None or _is(launch, k.name)]


def _roles(artifact: Artifact, contract: Contract) -> Mapping[str, Role]:
    """Roles that a contract gives by kernel parameter."""
    found: dict[str, Role] = {}
    for launch in artifact.launches:
        for k in _entries(launch, contract):
            for b in k.buffer:
                if b.param < len(launch.params):
                    pointers = launch.params[b.param].relocations
                    found.update({r.buffer: b.role for r in pointers if r.offset == b.offset})
    return found


def _as_the_contract_says(artifact: Artifact, contract: Contract, path: Path, plain: PlainFile) -> Artifact:
    """The launches with the contract's PDL attribute; the file's own shapes must be the contract's."""
    for k in contract.kernel:
        if k.name is not None and not any(_is(launch, k.name) for launch in artifact.launches):
            raise UnknownNameError("kernel", k.name, plain.kernels)
    launches = []
    for launch in artifact.launches:
        for k in _entries(launch, contract):
            for what in sorted({"grid", "block", "cluster"} & k.model_fields_set):
                mine, theirs = getattr(launch, what), getattr(k, what)
                if mine != theirs:
                    raise ContentError(
                        path, f"{what} is {list(theirs)}, but {plain.path.name} launches {list(mine)}"
                    )
            if "pdl" in k.model_fields_set:
                launch = launch.model_copy(update={"pdl": k.pdl})
        launches.append(launch)
    return artifact.model_copy(update={"launches": tuple(launches)})
