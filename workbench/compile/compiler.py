"""A request becomes an artifact: screen, trace in the child, recover launches, assemble, check, store."""

from __future__ import annotations

import re

from workbench.artifact import Artifact, Resources, Toolchain
from workbench.compile.cache import ArtifactCache
from workbench.compile.checks import check_arch, check_launches, read_ptx_header, scrub_paths
from workbench.compile.client import CompileServer, Traced, default_server
from workbench.compile.launches import recover_launches
from workbench.compile.ptxas import assemble, toolchain_identity
from workbench.compile.request import CompileError, CompileRequest, Limits
from workbench.compile.screen import screen
from workbench.isa.cubin import CubinError, CubinKernel, read_cubin

REVISION = "1"
"""Counts changes to this pipeline that change artifacts; part of every key."""


def artifact_key(request: CompileRequest) -> str:
    """Content key of a request with the installed toolchain; raises MissingToolError."""
    return request.key({**toolchain_identity(), "pipeline": REVISION})


def compile_candidate(
    request: CompileRequest,
    cache: ArtifactCache | None = None,
    limits: Limits | None = None,
    server: CompileServer | None = None,
    *,
    default_stream: bool = False,
) -> Artifact:
    """Compile a candidate, or take it from the cache.

    Candidate code runs only in a fenced child of `server` (by default one that this process shares). It takes
    about 0.15 s once the server is warm. With `default_stream` its launches need name no stream.

    Raises:
        CompileError: typed, whatever the candidate is or does.
        MissingToolError: if CuTe DSL or ptxas is not installed.
        WorkbenchError: if the cache or the temporary folder cannot be used.
    """
    limits = limits or Limits()
    screen(request.source)
    key = artifact_key(request)
    if cache is not None and (stored := cache.get(key)) is not None:
        return stored
    traced = (server or default_server()).trace(request, limits)
    artifact = _build(request, key, traced, limits, default_stream)
    if cache is not None:
        cache.put(artifact)
    return artifact


def _build(
    request: CompileRequest, key: str, traced: Traced, limits: Limits, default_stream: bool
) -> Artifact:
    ptx = scrub_paths(traced.ptx)
    header = read_ptx_header(ptx)
    if header.target != request.arch:
        raise CompileError("arch", f"the PTX is for {header.target}, wanted {request.arch}")
    if set(traced.parameters[:-1]) - {b.name for b in request.buffers} or traced.parameters[-1:] != (
        "stream",
    ):
        raise CompileError("crash", "the compile process answered with parameters that are no buffers")
    launches = recover_launches(
        traced.mlir, traced.function, traced.parameters, request.buffers, default_stream=default_stream
    )
    assembled = assemble(ptx, request.arch, request.ptxas_flags, limits)
    try:
        cubin = read_cubin(assembled.cubin)
    except CubinError as e:
        raise CompileError("tool", f"ptxas wrote a cubin that cannot be read: {e}") from e
    check_arch(header, cubin, request.arch)
    check_launches(launches, header, cubin)
    identity = toolchain_identity()
    if traced.flavour.split(".")[0] != identity["flavour"]:
        wanted, got = identity["flavour"], traced.flavour[:20]
        raise CompileError(
            "tool", f"CuTe DSL runs with its libraries for CUDA {got}, not {wanted} as expected"
        )
    toolchain = Toolchain(
        dsl=identity["nvidia-cutlass-dsl"],
        flavour=_flavour(traced.flavour),
        ptx_isa=header.version,
        ptxas=identity["ptxas"],
        ptxas_flags=request.ptxas_flags,
    )
    return Artifact(
        key=key,
        op=request.op,
        workload=request.workload,
        axes=request.axes,
        template=request.template,
        knobs=request.knobs,
        arch=request.arch,
        source=request.source,
        source_hash=request.source_hash,
        toolchain=toolchain,
        buffers=request.buffers,
        launches=launches,
        resources={name: _resources(k, assembled.spills.get(name)) for name, k in cubin.kernels.items()},
        fences=traced.fences,
        ptx=ptx,
        cubin=assembled.cubin,
    )


def _resources(kernel: CubinKernel, spills: tuple[int, int] | None) -> Resources:
    stores, loads = spills or (0, 0)
    return Resources(
        registers=kernel.registers,
        static_smem=kernel.static_smem,
        stack_bytes=kernel.frame_bytes,
        spill_stores=stores,
        spill_loads=loads,
    )


def _flavour(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise CompileError("crash", "the compile process answered with a flavour that is no version")
    return text
