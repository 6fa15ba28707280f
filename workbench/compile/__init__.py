"""Source to artifact: a fenced child traces the candidate, launches are recovered, ptxas assembles outside.

    request = CompileRequest.of(op, "tp8_b1", template, knobs)
    artifact = compile_candidate(request, ArtifactCache(workspace.cache))

The DSL is imported by the compile server alone; importing this package imports neither cutlass nor torch.
"""

from workbench.compile.cache import ArtifactCache
from workbench.compile.client import CompileServer, Traced, default_server
from workbench.compile.compiler import artifact_key, compile_candidate
from workbench.compile.launches import recover_launches
from workbench.compile.ptxas import find_ptxas, ptxas_version, toolchain_identity
from workbench.compile.request import ARCHITECTURES, DEFAULT_PTXAS_FLAGS, CompileError, CompileRequest, Limits
from workbench.compile.sandbox import FENCES, sandbox_capabilities
from workbench.compile.screen import screen

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_PTXAS_FLAGS",
    "FENCES",
    "ArtifactCache",
    "CompileError",
    "CompileRequest",
    "CompileServer",
    "Limits",
    "Traced",
    "artifact_key",
    "compile_candidate",
    "default_server",
    "find_ptxas",
    "ptxas_version",
    "recover_launches",
    "sandbox_capabilities",
    "screen",
    "toolchain_identity",
]
