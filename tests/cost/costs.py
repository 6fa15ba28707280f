"""Hand-made artifacts and counters for the cost model."""

from __future__ import annotations

from workbench.artifact import Artifact, BoundBuffer, KernelParam, Launch, Relocation, Resources, Toolchain
from workbench.isa.sass.model import SassModule
from workbench.isa.sass.parser import parse_sass
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.simulator.counters import Counters

MB = 1_000_000

PTX = """
.version 8.8
.target sm_103a
.address_size 64
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .f32 %f<40>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [k_param_0];
    ld.param.u64 %rd2, [k_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd1, %rd3;
LOADS
    st.global.f32 [%rd2], %f30;
    ret;
}
"""
LOAD = "    ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd4];\n"


def loads(count: int, *, together: bool) -> str:
    """`count` 16-byte loads and their sums, all loads first or each followed by its use."""
    lines: list[str] = []
    for i in range(count):
        n = 4 * i if together else 0
        lines.append(f"    ld.global.v4.f32 {{%f{n}, %f{n + 1}, %f{n + 2}, %f{n + 3}}}, [%rd4+{512 * i}];")
        if not together:
            lines.append("    add.f32 %f30, %f30, %f0;")
    if together:
        lines += [f"    add.f32 %f30, %f30, %f{4 * i};" for i in range(count)]
    return "\n".join(lines)


def artifact(
    *,
    grid: int = 152,
    threads: int = 128,
    body: str = LOAD,
    registers: int = 32,
    smem: int = 0,
    pdl: bool = True,
    launches: int = 1,
    weight_bytes: int = 64 * MB,
) -> Artifact:
    param = [KernelParam(data="00" * 8, relocations=(Relocation(offset=0, buffer=b),)) for b in ("w", "out")]
    launch = Launch(
        kernel="k",
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=smem,
        pdl=pdl,
        params=tuple(param),
    )
    return Artifact(
        key="key",
        op="toy",
        workload="w",
        axes={"B": 1},
        template="t",
        knobs={},
        arch="sm_103a",
        source="",
        source_hash="",
        toolchain=Toolchain(dsl="4", flavour="13", ptx_isa="8.8", ptxas="13"),
        buffers=(
            BoundBuffer(name="w", shape=(weight_bytes,), dtype=DType.U8, role=Role.WEIGHT),
            BoundBuffer(name="out", shape=(1024,), dtype=DType.F32, role=Role.OUTPUT),
        ),
        launches=(launch,) * launches,
        resources={"k": Resources(registers=registers)},
        ptx=PTX.replace("LOADS", body),
        cubin=b"",
    )


def counters(
    *,
    ctas: int = 152,
    warps_a_cta: int = 4,
    load_bytes: int = 32 * MB,
    instructions: dict[str, int] | None = None,
    longest: dict[str, int] | None = None,
    sectors: int | None = None,
) -> Counters:
    """Counters of a launch that reads `load_bytes` distinct bytes once."""
    per_warp = instructions or {"load_global": 4, "fp32": 20}
    return Counters(
        kernel="k",
        ctas=ctas,
        warps=ctas * warps_a_cta,
        lane_instructions=0,
        warp_instructions={k: n * ctas * warps_a_cta for k, n in per_warp.items()},
        longest_warp=longest or per_warp,
        global_load_bytes=load_bytes,
        global_load_sectors=load_bytes // 32 if sectors is None else sectors,
        unique_load_bytes=load_bytes,
    )


def sass(count: int, *, together: bool) -> SassModule:
    """The same loads and sums as `loads`, as SASS: there the order is that of execution."""
    lines: list[str] = []
    for i in range(count):
        r = 4 + 4 * i if together else 4
        lines.append(f"LDG.E.128 R{r}, desc[UR6][R2.64+{512 * i:#x}]")
        if not together:
            lines.append("FADD R60, R60, R4")
    if together:
        lines += [f"FADD R60, R60, R{4 + 4 * i}" for i in range(count)]
    lines += ["STG.E desc[UR6][R50.64], R60", "EXIT"]
    code = "".join(f"        /*{16 * i:04x}*/  {text} ;\n" for i, text in enumerate(lines))
    return parse_sass(f'\t.target\tsm_103a\n\t.section\t.text.k,"ax",@progbits\n\t.text.k:\n{code}')
