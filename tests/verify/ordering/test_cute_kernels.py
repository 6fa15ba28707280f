"""The audit on kernels that CuTe DSL compiled, each fault planted and left out."""

from __future__ import annotations

from functools import cache

import pytest

from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.errors import MissingToolError
from workbench.findings import Finding
from workbench.isa.sass import disassemble, parse_sass
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.verify.ordering import audit as audit_module_export
from workbench.verify.ordering.static import audit
from workbench.verify.report import Check, Verdict

SOURCE = """
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

C = cute.arch


@cute.jit
def nc(t: cute.Tensor, i: Int32) -> Float32:
    return C.inline_ptx("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32],
                        read_only_args=[(t.iterator + i).toint()])


@cute.kernel
def kernel(x: cute.Tensor, w: cute.Tensor, mid: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    warp = tid // 32
    i = bid * 128 + tid
FIRST


@cute.kernel
def second(x: cute.Tensor, w: cute.Tensor, mid: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    i = bid * 128 + tid
SECOND


@cute.jit
def host(x: cute.Tensor, w: cute.Tensor, mid: cute.Tensor, out: cute.Tensor, stream):
    kernel(x, w, mid, out).launch(grid=[8, 1, 1], block=[128, 1, 1], stream=stream, use_pdl=PDL)
CHAIN


def build(axes, knobs):
    return host
"""
ARCHS = pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
ELECTED = "if tid < 32:\n    with C.elect_one():\n        C.griddepcontrol_wait()\n"


def _body(lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines.strip("\n").splitlines())


@cache
def compiled(server: CompileServer, first: str, second: str, pdl: bool, arch: str) -> Artifact:
    chain = "    second(x, w, mid, out).launch(grid=[8,1,1], block=[128,1,1], stream=stream, use_pdl=True)\n"
    source = (
        SOURCE.replace("FIRST", _body(first))
        .replace("SECOND", _body(second or "out[i] = x[i]"))
        .replace("PDL", str(pdl))
        .replace("CHAIN", chain if second else "")
    )
    roles = {"x": Role.ACTIVATION, "w": Role.WEIGHT, "mid": Role.SCRATCH, "out": Role.OUTPUT}
    buffers = tuple(BoundBuffer(name=n, shape=(1024,), dtype=DType.F32, role=r) for n, r in roles.items())
    request = CompileRequest(
        op="demo",
        workload="small",
        axes={},
        template="demo",
        knobs={},
        arch=arch,
        source=source,
        buffers=buffers,
    )
    return compile_candidate(request, server=server)


def check(
    server: CompileServer, first: str, second: str = "", *, pdl: bool = True, arch: str = "sm_103a"
) -> Check:
    return audit(compiled(server, first, second, pdl, arch))


def errors(result: Check) -> list[tuple[str, str | None]]:
    return [(f.rule, f.buffer) for f in result.findings if f.severity == "error"]


def only(result: Check, rule: str) -> Finding:
    (found,) = [f for f in result.findings if f.rule == rule]
    return found


@ARCHS
def test_weights_before_and_activations_after_the_wait(server: CompileServer, arch: str) -> None:
    result = check(server, "a = w[i]\nC.griddepcontrol_wait()\nout[i] = x[i] * a", arch=arch)
    assert result.name == "ordering/static"
    assert result.verdict is Verdict.PASS
    assert not result.findings
    assert result.measures["undecided"] == 0


@ARCHS
def test_activation_above_the_wait(server: CompileServer, arch: str) -> None:
    result = check(server, "a = x[i]\nC.griddepcontrol_wait()\nout[i] = w[i] * a", arch=arch)
    assert result.verdict is Verdict.FAIL
    assert errors(result) == [("pdl-load-before-wait", "x")]
    finding = only(result, "pdl-load-before-wait")
    line = compiled(server, "a = x[i]\nC.griddepcontrol_wait()\nout[i] = w[i] * a", "", True, arch).source
    number = line.splitlines().index("    a = x[i]") + 1
    assert finding.source is not None
    assert finding.source.endswith(f":{number}")
    assert finding.ptx_line is not None
    assert finding.sass_offset is not None


@ARCHS
def test_c40_wait_compiled_out_under_a_pdl_launch(server: CompileServer, arch: str) -> None:
    bare = "out[i] = w[i] * x[i]"
    assert errors(check(server, bare, arch=arch)) == [("pdl-wait-missing", "out, x")]
    assert check(server, bare, pdl=False, arch=arch).verdict is Verdict.PASS
    with_wait = compiled(server, "C.griddepcontrol_wait()\n" + bare, "", True, arch)
    assert audit(with_wait).verdict is Verdict.PASS
    text = disassemble(with_wait.cubin)
    assert "ACQBULK" in text
    result = audit(with_wait, parse_sass(text.replace("ACQBULK ;", "NOP ;")))
    assert [f.rule for f in result.findings] == ["pdl-wait-missing"]
    assert "ACQBULK" in result.findings[0].message


@ARCHS
def test_elected_wait_and_barrier(server: CompileServer, arch: str) -> None:
    assert check(server, ELECTED + "C.sync_threads()\nout[i] = x[i]", arch=arch).verdict is Verdict.PASS
    loose = check(server, ELECTED + "out[i] = x[i]", arch=arch)
    assert set(errors(loose)) == {("pdl-load-before-wait", "x"), ("pdl-load-before-wait", "out")}


@ARCHS
def test_the_bug_that_started_it(server: CompileServer, arch: str) -> None:
    """Elected wait, barrier, read-only load: right order in the PTX, wrong order in the SASS."""
    artifact = compiled(server, ELECTED + "C.sync_threads()\nout[i] = nc(x, i)", "", True, arch)
    wait, barrier, load = (artifact.ptx.index(t) for t in ("griddepcontrol.wait", "bar.sync", "ld.global.nc"))
    assert wait < barrier < load
    text = disassemble(artifact.cubin)
    sass = [text.index(t) for t in ("ACQBULK", "LDG.E.CONSTANT", "BAR.SYNC")]
    assert sass[1] < sass[2]
    result = audit(artifact)
    assert result.verdict is Verdict.FAIL
    finding = only(result, "nc-load-of-mutable")
    assert (finding.severity, finding.buffer) == ("error", "x")
    assert finding.sass_offset is not None
    assert parse_sass(text).functions[0].at(finding.sass_offset).name == "LDG.E.CONSTANT"
    assert "moved" in finding.message


@ARCHS
def test_read_only_load_after_everybodys_wait_is_a_warning(server: CompileServer, arch: str) -> None:
    result = check(server, "C.griddepcontrol_wait()\nout[i] = nc(x, i)", arch=arch)
    assert result.verdict is Verdict.PASS
    assert [(f.rule, f.severity) for f in result.findings] == [("nc-load-of-mutable", "warning")]


@ARCHS
def test_read_only_prefetch_that_sinks(server: CompileServer, arch: str) -> None:
    sunk = check(server, "a = nc(w, i)\nC.griddepcontrol_wait()\nout[i] = x[i] * a", arch=arch)
    assert sunk.verdict is Verdict.PASS
    assert only(sunk, "prefetch-sunk").buffer == "w"
    assert not check(server, "a = w[i]\nC.griddepcontrol_wait()\nout[i] = x[i] * a", arch=arch).findings


@ARCHS
def test_output_above_the_wait(server: CompileServer, arch: str) -> None:
    result = check(server, "out[i] = w[i]\nC.griddepcontrol_wait()\nmid[i] = x[i]", arch=arch)
    assert errors(result) == [("pdl-load-before-wait", "out")]


ROLES = """
if warp == 0:
    C.griddepcontrol_wait()
    BARRIER
    mid[i] = x[i]
elif warp == 1:
    BARRIER
    out[i] = x[i + 1]
elif warp == 2:
    out[i] = mid[i + 2]
"""


@ARCHS
def test_c41_only_the_unordered_roles_are_named(server: CompileServer, arch: str) -> None:
    source = ROLES.strip()
    loose = check(server, source.replace("    BARRIER\n", ""), arch=arch)
    assert set(errors(loose)) == {
        ("pdl-load-before-wait", "x"),
        ("pdl-load-before-wait", "mid"),
        ("pdl-load-before-wait", "out"),
    }
    two = check(server, source.replace("BARRIER", "C.barrier(barrier_id=1, number_of_threads=64)"), arch=arch)
    assert set(errors(two)) == {("pdl-load-before-wait", "mid"), ("pdl-load-before-wait", "out")}
    fixed = "if warp == 3:\n    C.griddepcontrol_wait()\nC.sync_threads()\n" + source.replace(
        "    C.griddepcontrol_wait()\n    BARRIER\n", ""
    ).replace("    BARRIER\n", "")
    assert check(server, fixed, arch=arch).verdict is Verdict.PASS


# -- chains ----------------------------------------------------------------------------------------

PRODUCER = "C.griddepcontrol_wait()\nmid[i] = x[i]\nC.griddepcontrol_launch_dependents()"


def test_scratch_between_pdl_launches(server: CompileServer) -> None:
    good = check(server, PRODUCER, "C.griddepcontrol_wait()\nout[i] = mid[i]")
    assert good.verdict is Verdict.PASS
    bad = check(server, PRODUCER, "a = mid[i]\nC.griddepcontrol_wait()\nout[i] = a")
    assert errors(bad) == [("pdl-load-before-wait", "mid")]
    assert "launch 0" in only(bad, "pdl-load-before-wait").message


def test_input_of_the_chain_is_complete_after_an_ordinary_first_launch(server: CompileServer) -> None:
    second = "a = x[i]\nC.griddepcontrol_wait()\nout[i] = mid[i] + a"
    assert check(server, "mid[i] = x[i]", second, pdl=False).verdict is Verdict.PASS
    # A PDL first launch that waits before it triggers has drained what came before as well.
    assert check(server, PRODUCER, second).verdict is Verdict.PASS
    early = "C.griddepcontrol_launch_dependents()\nC.griddepcontrol_wait()\nmid[i] = x[i]"
    assert errors(check(server, early, second)) == [("pdl-load-before-wait", "x")]


def test_a_launch_that_never_waits_breaks_the_chain(server: CompileServer) -> None:
    lazy = "C.griddepcontrol_launch_dependents()"
    result = check(server, lazy, "C.griddepcontrol_wait()\nout[i] = x[i]")
    assert errors(result) == [("pdl-chain-not-transitive", "out, x")]
    assert errors(check(server, "C.griddepcontrol_wait()", "C.griddepcontrol_wait()\nout[i] = x[i]")) == []


def test_overwriting_what_the_predecessor_still_reads(server: CompileServer) -> None:
    second = "x[i] = w[i]\nC.griddepcontrol_wait()\nout[i] = mid[i]"
    result = check(server, "mid[i] = x[i]", second, pdl=False)
    assert errors(result) == [("pdl-load-before-wait", "x")]
    assert "written before" in only(result, "pdl-load-before-wait").message


# -- tools -----------------------------------------------------------------------------------------


def test_without_nvdisasm_nothing_passes(server: CompileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(data: bytes) -> str:
        raise MissingToolError("nvdisasm is not installed; pip install 'nvidia-cuda-nvdisasm>=13.0'")

    monkeypatch.setattr("workbench.verify.ordering.static.disassemble", absent)
    result = check(server, "C.griddepcontrol_wait()\nout[i] = x[i]")
    assert result.verdict is Verdict.UNKNOWN
    assert "nvdisasm is not installed" in result.summary
    assert check(server, "a = x[i]\nC.griddepcontrol_wait()\nout[i] = a").verdict is Verdict.FAIL


def test_the_package_exports_the_function() -> None:
    assert audit_module_export is audit
