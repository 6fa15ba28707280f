"""The whole way from source to artifact."""

import hashlib
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from candidates import SCALE, copy, request

from workbench.artifact import Artifact, Relocation
from workbench.compile import (
    ARCHITECTURES,
    ArtifactCache,
    CompileError,
    CompileRequest,
    CompileServer,
    Limits,
    artifact_key,
    compile_candidate,
)
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.isa.cubin import read_cubin


def compiled(source: str, server: CompileServer, **changes: object) -> Artifact:
    return compile_candidate(request(source, **changes), server=server)


def test_launches_are_those_of_the_source(server: CompileServer) -> None:
    artifact = compiled(SCALE, server)
    first, *rest = artifact.launches
    assert (first.grid, first.block, first.cluster, first.smem_bytes) == ((4, 1, 1), (64, 1, 1), (1, 1, 1), 0)
    assert not first.pdl and not first.cooperative
    assert [p.relocations for p in first.params] == [
        (Relocation(offset=0, buffer="x", addend=0),),
        (Relocation(offset=0, buffer="y", addend=0),),
        (),
    ]
    assert first.params[2].data == "00002040"  # 2.5f, a constant of the op
    # Two unrolled launches with their own shared memory, then three of a run-time loop.
    assert [launch.smem_bytes for launch in rest] == [1024, 2048, 0, 0, 0]
    assert all(launch.pdl for launch in rest)
    assert [launch.params[1].relocations[0].addend for launch in rest] == [1024 * r for r in range(5)]
    assert [launch.params[1].relocations[0].buffer for launch in rest] == ["out"] * 5
    assert [int.from_bytes(bytes.fromhex(launch.params[3].data), "little") for launch in rest] == list(
        range(5)
    )
    assert [launch.params[2].data for launch in rest] == ["0000803f"] * 2 + ["0000003f"] * 3
    assert len({launch.kernel for launch in rest[2:]}) == 1
    assert {launch.kernel for launch in artifact.launches} <= artifact.resources.keys()


def test_parameters_bind_to_addresses(server: CompileServer) -> None:
    launch = compiled(SCALE, server).launches[-1]
    addresses = {"x": 0x1000, "y": 0x7F0000000000, "out": 1 << 33}
    assert launch.params[0].bind(addresses) == (0x7F0000000000).to_bytes(8, "little")
    assert launch.params[1].bind(addresses) == ((1 << 33) + 4 * 1024).to_bytes(8, "little")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_object_is_for_the_wanted_arch(server: CompileServer, arch: str) -> None:
    artifact = compiled(SCALE, server, arch=arch)
    assert f".target {arch}\n" in artifact.ptx
    assert read_cubin(artifact.cubin).arch == arch
    assert artifact.arch == arch and artifact.toolchain.ptx_isa == "9.4"


def test_arch_does_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    with CompileServer() as own:
        assert ".target sm_103a\n" in compiled(copy(), own).ptx


def test_unknown_arch_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="sm_103a"):
        request(copy(), arch="sm_107a")


def test_equal_sources_give_equal_bytes(server: CompileServer, tmp_path: Path) -> None:
    first = compiled(SCALE, server)
    with CompileServer() as other:
        second = compile_candidate(request(SCALE), ArtifactCache(tmp_path), server=other)
    assert first == second
    assert (
        "/tmp" not in first.ptx
        and b"/tmp" not in first.cubin
        and str(Path.home()).encode() not in first.cubin
    )
    assert '.file\t1 "candidate.py"' in first.ptx


def test_sources_under_one_name_do_not_mix(server: CompileServer) -> None:
    one, two = copy(factor="1.5"), copy(factor="7.0")
    a, b, a2 = compiled(one, server), compiled(two, server), compiled(one, server)
    assert a == a2
    assert "0f3FC00000" in a.ptx and "0f40E00000" in b.ptx and "0f3FC00000" not in b.ptx
    assert a.key != b.key and a.cubin != b.cubin


def test_edited_source_is_not_served_from_the_cache(server: CompileServer, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    path = tmp_path / "template.py"
    seen = []
    for factor in ("1.5", "7.0", "1.5"):
        path.write_text(copy(factor=factor))
        seen.append(compile_candidate(request(path.read_text()), cache, server=server))
    assert seen[0] == seen[2] != seen[1]
    assert "0f40E00000" in seen[1].ptx
    assert seen[1].source_hash == hashlib.sha256(path.read_text().replace("1.5", "7.0").encode()).hexdigest()


def test_every_field_enters_the_key() -> None:
    base = request(SCALE)
    smaller = tuple(b.model_copy(update={"align": 16}) for b in base.buffers)
    changes = {
        "op": "other", "workload": "other", "axes": {"N": 512, "B": 5}, "template": "other",
        "knobs": {"threads": 32}, "arch": "sm_90a", "source": SCALE + "\n", "constants": {"factor": 2.0},
        "buffers": smaller, "ptxas_flags": ("-O3",),
    }  # fmt: skip
    assert changes.keys() == CompileRequest.model_fields.keys()
    keys = {artifact_key(request(SCALE))}
    for name, value in changes.items():
        keys.add(artifact_key(CompileRequest(**{**dict(base), name: value})))
    assert len(keys) == len(changes) + 1
    same = {"knobs": {"threads": 1}}, {"knobs": {"threads": True}}
    assert len({artifact_key(request(SCALE, **c)) for c in same}) == 2
    assert base.key({"ptxas": "1"}) != base.key({"ptxas": "2"})


def test_warm_cache_needs_no_child(tmp_path: Path, server: CompileServer) -> None:
    cache = ArtifactCache(tmp_path)
    first = compile_candidate(request(SCALE), cache, server=server)
    cold = CompileServer()
    assert compile_candidate(request(SCALE), cache, server=cold) == first
    assert cold.pid is None


def test_ptxas_flags_reach_ptxas(server: CompileServer) -> None:
    plain, slow = (
        compiled(SCALE, server, ptxas_flags=f) for f in (("-O3", "-lineinfo"), ("-O0", "-lineinfo"))
    )
    assert plain.ptx == slow.ptx and plain.cubin != slow.cubin
    assert slow.toolchain.ptxas_flags == ("-O0", "-lineinfo")


@pytest.mark.parametrize("flag", ["-o /etc/x", "--options-file=x", "-arch=sm_80", "-O9", "--output-file"])
def test_ptxas_flags_are_an_allow_list(flag: str) -> None:
    with pytest.raises(WorkbenchError, match="ptxas flag"):
        request(SCALE, ptxas_flags=(flag,))


def test_names_of_axes_and_constants_must_differ() -> None:
    with pytest.raises(WorkbenchError, match="both axes and constants"):
        request(SCALE, constants={"N": 3})


@pytest.mark.parametrize(
    ("source", "kind", "line", "message"),
    [
        (copy(build="raise ValueError('no luck')"), "user", 15, "ValueError: no luck"),
        (copy(factor="nope"), "user", 7, "'nope' is not defined"),
        (copy().replace("y[tid] = x", "if tid > 3:\n        z = 1.0\n    y[tid] = z * x"), "user", 9, "'z'"),
        (copy().replace("y[tid] = x", "if tid > 3:\n        return\n    y[tid] = x"), "user", 8,
         "Early exit"),
        ("def build(:\n", "user", 1, "SyntaxError"),
        ("import math\n", "user", None, "no function `build"),
        (copy().replace("return host", "return 3"), "user", None, "callable, not int"),
        (copy().replace("y: cute.Tensor, stream", "z: cute.Tensor, stream"), "user", None,
         "'z' is no buffer"),
        (copy().replace("y: cute.Tensor, stream", "y: cute.Tensor"), "user", None, "must be `stream`"),
        (copy().replace(", stream=stream", ""), "user", None, "without `stream=stream`"),
        (copy(block="[2048, 1, 1]"), "user", None, "block (2048, 1, 1) is not launchable"),
        (copy(grid="[70000, 70000, 1]"), "user", None, "grid (70000, 70000, 1) is not launchable"),
        (copy(grid="[3, 1, 1]", more=", cluster=[2, 1, 1]"), "user", None, "does not divide grid"),
        (copy(more=", smem=240000"), "user", None, "shared memory"),
    ],
)  # fmt: skip
def test_failures_are_typed_with_their_line(
    server: CompileServer, source: str, kind: str, line: int | None, message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(source, server)
    assert (caught.value.kind, caught.value.line) == (kind, line)
    assert message in caught.value.message
    assert "\x1b" not in str(caught.value) + caught.value.detail and "\n" not in str(caught.value)
    assert "/tmp/" not in str(caught.value)


def test_a_good_compile_follows_a_bad_one(server: CompileServer) -> None:
    before = compiled(SCALE, server)
    with pytest.raises(CompileError):
        compiled(copy(factor="nope"), server)
    assert compiled(SCALE, server) == before


INLINE = """
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def assembly(text):
    return llvm.inline_asm(T.i32(), [], text, "=r", has_side_effects=True, is_align_stack=False,
                           asm_dialect=llvm.AsmDialect.AD_ATT)

"""


def test_assembler_errors_are_the_compilers(server: CompileServer) -> None:
    source = copy(head=INLINE).replace("    y[tid]", "    assembly('bogus.s32 $0;')\n    y[tid]")
    with pytest.raises(CompileError) as caught:
        compiled(source, server)
    assert caught.value.kind == "compiler" and "Not a name" in caught.value.message


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("narrow", ["Float8E4M3FN", "Float8E8M0FNU", "Float4E2M1FN"])
def test_narrow_conversions_compile_or_fail_typed(server: CompileServer, arch: str, narrow: str) -> None:
    lines = (
        "    r = cute.make_rmem_tensor(cute.make_layout(8), cute.Float32)\n"
        "    for i in range(8):\n        r[i] = x[0, tid + i]\n"
        f"    y[tid] = r.load().to(cutlass.{narrow}).to(cutlass.Float32)[0]\n"
    )
    source = copy(head="import cutlass\n").replace("    y[tid] = x[0, tid] * 1.0\n", lines)
    try:
        ptx = compiled(source, server, arch=arch).ptx
    except CompileError as e:
        # libNVVM and ptxas refuse what the target lacks; none of it is the candidate's own fault.
        assert arch == "sm_90a" and narrow != "Float8E4M3FN" and e.kind == "compiler", (e, e.detail)
        assert "\n" not in str(e) and e.detail
    else:
        kind = {"Float8E4M3FN": "e4m3x2", "Float8E8M0FNU": "ue8m0x2", "Float4E2M1FN": "e2m1x2"}[narrow]
        assert kind in ptx


def test_launch_with_cluster_and_cooperative(server: CompileServer) -> None:
    (launch,) = compiled(
        copy(grid="[4, 2, 1]", more=", cluster=[2, 2, 1], cooperative=True"), server
    ).launches
    assert (launch.grid, launch.cluster, launch.cooperative, launch.pdl) == (
        (4, 2, 1),
        (2, 2, 1),
        True,
        False,
    )


def test_packed_and_byte_buffers_reach_the_kernel(server: CompileServer) -> None:
    source = """
import cutlass
import cutlass.cute as cute

@cute.kernel
def kernel(w: cute.Tensor, s: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    y[tid] = cutlass.Float32(cutlass.Int32(w[1, tid])) + cutlass.Float32(cutlass.Int32(s[1, tid // 16]))

@cute.jit
def host(w: cute.Tensor, s: cute.Tensor, y: cute.Tensor, stream):
    assert w.shape == (2, 64) and s.shape == (2, 4) and w.element_type is cutlass.Uint8
    kernel(w, s, y).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

def build(axes, knobs):
    return host
"""
    base = request(source)
    make = type(base.buffers[0])
    buffers = (
        make(name="w", shape=(2, 128), dtype="e2m1", role="weight"),
        make(name="s", shape=(2, 4), dtype="e8m0", role="weight"),
        make(name="y", shape=(64,), dtype="f32", role="output"),
    )
    (launch,) = compiled(source, server, buffers=buffers).launches
    assert [p.relocations[0].buffer for p in launch.params] == ["w", "s", "y"]


STATIC = (
    "    s = cute.arch.alloc_smem(cute.Float32, {n})\n    s[tid] = x[0, tid]\n    cute.arch.sync_threads()\n"
)
DYNAMIC = (
    "    d = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))\n"
    "    d[tid] = x[1, tid]\n    cute.arch.sync_threads()\n"
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("words", "dynamic"), [(0, False), (0, True), (64, False), (1000, False), (70, True)]
)
def test_resources_are_what_the_assembler_says(
    server: CompileServer, arch: str, words: int, dynamic: bool
) -> None:
    """The cubin's sections against the log of ptxas, which counts for itself."""
    from workbench.compile.ptxas import assemble

    lines = (STATIC.format(n=words) if words else "") + (DYNAMIC if dynamic else "")
    value = " + ".join(["x[0, tid]"] + ["s[63 - tid]"] * bool(words) + ["d[63 - tid]"] * dynamic)
    source = copy(head="import cutlass\n").replace("    y[tid] = x[0, tid]", f"{lines}    y[tid] = {value}")
    artifact = compiled(source, server, arch=arch)
    (resources,) = artifact.resources.values()
    log = assemble(artifact.ptx, arch, artifact.toolchain.ptxas_flags, Limits()).log
    used = re.search(r"Used (\d+) registers, used \d+ barriers(?:, (\d+) bytes smem)?", log)
    assert used is not None
    assert (resources.registers, resources.static_smem) == (int(used[1]), int(used[2] or 0))
    # Dynamic shared memory follows the static one, aligned to 1024.
    static = -(-4 * words // 1024) * 1024 if dynamic else 4 * words
    assert resources.static_smem == static and artifact.launches[0].smem_bytes == 256 * dynamic


def test_spills_are_counted(server: CompileServer) -> None:
    # 1024 threads leave 64 registers each; a hundred live values do not fit.
    lines = "".join(f"    v{i} = x[{i % 5}, (tid + {i}) % 256]\n" for i in range(100))
    uses = "".join(
        f"    y[tid % 256] = v{i} * v{(i * 7) % 100}\n    cute.arch.sync_threads()\n" for i in range(100)
    )
    source = copy(block="[1024, 1, 1]").replace("    y[tid] = x[0, tid] * 1.0\n", lines + uses)
    (resources,) = compiled(source, server).resources.values()
    assert resources.registers <= 64
    assert resources.spill_stores > 0 and resources.spill_loads > 0 and resources.stack_bytes > 0


def test_threads_of_one_process_share_a_server(server: CompileServer) -> None:
    found: dict[int, Artifact] = {}

    def work(i: int) -> None:
        found[i] = compiled(copy(factor=f"{i}.5"), server)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(found) == [0, 1, 2, 3]
    assert all(f"* {i}.5" in a.source for i, a in found.items())
    assert len({a.key for a in found.values()}) == 4


def _in_process(i: int) -> str:
    return compile_candidate(request(copy(factor=f"{i % 2}.5"))).key


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_have_servers_of_their_own(method: str) -> None:
    expected = [_in_process(i) for i in range(2)]  # starts this process's own server first
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_in_process, range(4), chunksize=1) == expected * 2
    assert _in_process(0) == expected[0]


def test_request_of_an_op_and_a_template() -> None:
    from workbench.ops import load_op
    from workbench.templates import load_template
    from workbench.workspace import Workspace

    workspace = Workspace(Path(__file__).parents[2])
    op = load_op(workspace, "rmsnorm")
    template = load_template(workspace.template("rmsnorm", workspace.template_names("rmsnorm")[0]))
    made = CompileRequest.of(op, op.workloads[0].name, template, template.default)
    assert made.constants == dict(op.constants) and {b.name for b in made.buffers} >= {"x", "weight", "out"}
    with pytest.raises(UnknownNameError):
        CompileRequest.of(op, "no such workload", template, template.default)


def test_limits_reach_ptxas(server: CompileServer) -> None:
    artifact = compiled(SCALE, server)
    from workbench.compile.ptxas import assemble

    with pytest.raises(CompileError) as caught:
        assemble(artifact.ptx, artifact.arch, (), Limits(seconds=1e-6))
    assert caught.value.kind == "timeout"


def test_importing_the_package_is_cheap() -> None:
    """Neither the DSL nor torch comes into the process of a user: candidates' compiler runs elsewhere."""
    code = "import sys, workbench.compile; print({'cutlass', 'torch', 'optuna'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_compiling_imports_no_dsl_here() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from candidates import copy, request\n"
        "from workbench.compile import compile_candidate\n"
        "compile_candidate(request(copy()))\n"
        "print({'cutlass', 'torch'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_file_that_was_edited_is_compiled_anew(server: CompileServer) -> None:
    """The same names twice: what was imported and traced before must not come back."""
    traced = [server.trace(request(copy(factor=factor)), Limits()).ptx for factor in ("3.0", "5.0", "3.0")]
    assert traced[0] == traced[2] != traced[1]
    three, five = ("0f40400000", "0f40A00000")
    assert three in traced[0] and five not in traced[0] and five in traced[1] and three not in traced[1]
    first, second = (compiled(copy(factor=factor), server) for factor in ("3.0", "5.0"))
    assert first.template == second.template and first.key != second.key and first.cubin != second.cubin


def test_a_compile_and_an_assembly_beyond_the_limit_end_within_it(server: CompileServer) -> None:
    many = "for i in cutlass.range_constexpr(1000000): y[tid] = x[0, tid] + y[(tid + i) % 64]"
    source = copy(head="import cutlass\n").replace("y[tid] = x[0, tid] * 1.0", many)
    start = time.monotonic()
    with pytest.raises(CompileError) as caught:
        server.trace(request(source), Limits(seconds=2))
    assert caught.value.kind == "timeout" and time.monotonic() - start < 2 + 5
    assert server.trace(request(copy()), Limits()).ptx
