"""The assembler outside the child, and what must agree with what it makes."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
from candidates import SCALE, copy, request

from workbench.artifact import Artifact, KernelParam
from workbench.compile import (
    CompileError,
    CompileServer,
    Limits,
    compile_candidate,
    find_ptxas,
    ptxas_version,
)
from workbench.compile import ptxas as module
from workbench.compile.checks import check_arch, check_launches, read_ptx_header, scrub_paths
from workbench.compile.ptxas import assemble, toolchain_identity
from workbench.errors import MissingToolError
from workbench.isa.cubin import CubinError, read_cubin


@pytest.fixture(scope="module")
def artifact(server: CompileServer) -> Artifact:
    return compile_candidate(request(SCALE), server=server)


def test_version_and_identity() -> None:
    identity = toolchain_identity()
    assert identity["ptxas"] == ptxas_version(find_ptxas()) and identity["ptxas"].count(".") == 2
    assert identity["nvidia-cutlass-dsl"].startswith("4.")


def test_missing_ptxas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "nvidia" else real(n, *a))
    server = CompileServer()
    with pytest.raises(MissingToolError, match="pip install 'nvidia-cuda-nvcc") as caught:
        compile_candidate(request(copy()), server=server)
    assert "\n" not in str(caught.value) and server.pid is None


def test_ptxas_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(MissingToolError, match="cannot be read"):
        ptxas_version(tmp_path / "ptxas")
    for content in ("not a program", "#!/bin/sh\necho hello\n", "#!/bin/sh\nexit 3\n"):
        path = tmp_path / f"ptxas{len(content)}"
        path.write_text(content)
        path.chmod(0o755)
        with pytest.raises(MissingToolError, match="nvidia-cuda-nvcc"):
            ptxas_version(path)


def test_missing_dsl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", missing)
    with pytest.raises(MissingToolError, match=r"pip install 'nvidia-cutlass-dsl\[cu13\]'"):
        toolchain_identity()


@pytest.mark.parametrize(
    ("packages", "driver", "flavour"),
    [
        (("cu12", "cu13"), None, "13"),
        (("cu12", "cu13"), 12, "12"),
        (("cu12", "cu13"), 14, "13"),
        (("cu12",), None, "12"),
        (("cu13",), 12, None),
        ((), None, None),
    ],
)
def test_flavour_follows_the_driver(
    monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], driver: int | None, flavour: str | None
) -> None:
    monkeypatch.setattr(module, "_driver_major", lambda: driver)
    names = ["nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{p}" for p in packages)]
    if flavour is None:
        with pytest.raises(MissingToolError, match="driver"):
            module.dsl_flavour(names)
    else:
        assert module.dsl_flavour(names) == flavour


def test_another_flavour_than_the_key_says_is_refused(
    server: CompileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_driver_major", lambda: 12)
    with pytest.raises(CompileError, match="not 12 as expected") as caught:
        compile_candidate(request(copy()), server=server)
    assert caught.value.kind == "tool"


@pytest.mark.parametrize(
    "flag",
    [
        "-O0", "-O1", "-O2", "-O3", "-lineinfo", "--fmad=false", "--fmad=true", "--maxrregcount=64",
        "--register-usage-level=3", "--allow-expensive-optimizations=false", "--def-load-cache=cg",
        "--def-store-cache=wt",
    ],
)  # fmt: skip
def test_allowed_flags_are_flags_of_ptxas(artifact: Artifact, flag: str) -> None:
    assert request(SCALE, ptxas_flags=(flag,)).ptxas_flags == (flag,)
    assert read_cubin(assemble(artifact.ptx, "sm_103a", (flag,), Limits()).cubin).sm == 103


def test_errors_are_the_compilers_with_the_first_line(artifact: Artifact) -> None:
    broken = artifact.ptx.replace("griddepcontrol.wait", "griddepcontrol.nonsense", 1)
    with pytest.raises(CompileError) as caught:
        assemble(broken, "sm_103a", (), Limits())
    assert caught.value.kind == "compiler" and "PTX line" in caught.value.message
    assert "\n" not in str(caught.value) and "/tmp" not in str(caught.value) + caught.value.detail
    with pytest.raises(CompileError) as caught:
        assemble("not PTX at all", "sm_103a", (), Limits())
    assert caught.value.kind == "compiler"


def test_out_of_memory_and_nothing_left_behind(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        assemble(artifact.ptx, "sm_103a", (), Limits(memory_bytes=8 << 20))
    assert caught.value.kind in ("memory", "compiler", "crash")
    assert not list(tmp_path.iterdir())


def test_object_for_another_arch_is_refused(artifact: Artifact) -> None:
    header = read_ptx_header(artifact.ptx)
    cubin = read_cubin(artifact.cubin)
    check_arch(header, cubin, "sm_103a")
    for wanted in ("sm_100a", "sm_90a"):
        with pytest.raises(CompileError) as caught:
            check_arch(header, cubin, wanted)
        assert caught.value.kind == "arch" and "sm_103a" in caught.value.message
    other = artifact.ptx.replace(".target sm_103a", ".target sm_100a")
    foreign = read_cubin(assemble(other, "sm_100a", (), Limits()).cubin)
    with pytest.raises(CompileError, match="cubin is for sm_100a"):
        check_arch(header, foreign, "sm_103a")
    family = artifact.ptx.replace(".target sm_103a", ".target sm_103")
    plain = read_cubin(assemble(family, "sm_103", (), Limits()).cubin)
    assert plain.sm == 103
    with pytest.raises(CompileError, match="cubin is for sm_103, wanted sm_103a"):
        check_arch(header, plain, "sm_103a")


def _change(artifact: Artifact, **changes: object) -> list[object]:
    return [artifact.launches[0].model_copy(update=changes)]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"kernel": "nobody"}, "compiler", "not in the PTX"),
        ({"params": ()}, "compiler", "parameters of"),
        ({"params": tuple(KernelParam(data="00" * n) for n in (8, 8, 8))}, "compiler", "parameters of"),
        ({"block": (0, 1, 1)}, "user", "not launchable"),
        ({"block": (1, 1, 128)}, "user", "not launchable"),
        ({"block": (32, 1, 1)}, "user", "compiled for"),
        ({"grid": (0, 1, 1)}, "user", "grid"),
        ({"grid": (1, 65536, 1)}, "user", "grid"),
        ({"cluster": (3, 1, 1)}, "user", "does not divide"),
        ({"cluster": (0, 1, 1)}, "user", "does not divide"),
        ({"cluster": (32, 1, 1), "grid": (32, 1, 1)}, "user", "more than 16"),
        ({"smem_bytes": 232449}, "user", "232448"),
    ],
)
def test_launches_that_cannot_be(
    artifact: Artifact, changes: dict[str, object], kind: str, message: str
) -> None:
    header, cubin = read_ptx_header(artifact.ptx), read_cubin(artifact.cubin)
    check_launches(artifact.launches, header, cubin)
    check_launches(_change(artifact, smem_bytes=232448), header, cubin)  # type: ignore[arg-type]
    with pytest.raises(CompileError) as caught:
        check_launches(_change(artifact, **changes), header, cubin)  # type: ignore[arg-type]
    assert caught.value.kind == kind and message in caught.value.message


def test_ptx_header() -> None:
    ptx = """
.version 9.4
.target sm_103a
.address_size 64
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u64 .ptr .global .align 16 k_param_1,
	.param .f32 k_param_2,
	.param .u8 k_param_3,
	.param .align 2 .b8 k_param_4[2]
)
.maxntid 256, 2
.minnctapersm 2
.reqnctapercluster 2, 1, 1
{ ret; }
.entry empty() { ret; }
"""
    header = read_ptx_header(ptx)
    assert (header.version, header.target) == ("9.4", "sm_103a")
    assert header.entries["k"].params == (128, 8, 4, 1, 2)
    assert header.entries["k"].max_threads == 512 and header.entries["k"].cluster == (2, 1, 1)
    assert header.entries["empty"].params == () and header.entries["empty"].block is None
    for bad in ("", ptx.replace(".target sm_103a", ""), ptx.replace(".param .f32", ".param .strange")):
        with pytest.raises(CompileError):
            read_ptx_header(bad)


def test_paths_are_scrubbed() -> None:
    lines = [
        ('.file 1 "/home/someone/secret/candidate.py"', '.file 1 "candidate.py"'),
        (
            '\t.file\t2 "/a/lib/python3.11/site-packages/cutlass/cute/arch.py"',
            '\t.file\t2 "cutlass/cute/arch.py"',
        ),
        ('.file 3 "/usr/lib/python3/dist-packages/cutlass/x.py"', '.file 3 "cutlass/x.py"'),
        ('.file 4 "candidate.py"', '.file 4 "candidate.py"'),
        ('.file 5 "/etc/passwd", 123, 456', '.file 5 "passwd", 123, 456'),
    ]
    assert scrub_paths("\n".join(a for a, _ in lines)) == "\n".join(b for _, b in lines)


def test_damaged_cubins_are_errors(artifact: Artifact) -> None:
    cubin = artifact.cubin
    assert read_cubin(cubin).kernels.keys() == artifact.resources.keys()
    for bad in (b"", b"\x7fELF", cubin[:100], cubin[: len(cubin) // 2], bytes(len(cubin)), b"x" + cubin[1:]):
        with pytest.raises(CubinError):
            read_cubin(bad)
    # Any single changed byte either reads or is this error: never another exception.
    for at in range(0, len(cubin), 97):
        with contextlib.suppress(CubinError):
            read_cubin(cubin[:at] + bytes([cubin[at] ^ 0xFF]) + cubin[at + 1 :])
