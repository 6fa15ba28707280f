"""The interpreter of host code on programs written here, with the values worked out by hand."""

from __future__ import annotations

import struct

import pytest
from candidates import request
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.artifact import BoundBuffer, Launch, Relocation
from workbench.compile import CompileError, CompileServer, compile_candidate, launches, recover_launches
from workbench.compile.hostcode import HostCodeError, decode, encode, parse_type, read_module
from workbench.ops.dtypes import DType
from workbench.ops.model import Role

CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
TENSOR = "!llvm.struct<(ptr<1>, struct<(struct<()>, struct<()>)>)>"
BUFFERS = (
    BoundBuffer(name="x", shape=(64,), dtype=DType.F32, role=Role.ACTIVATION),
    BoundBuffer(name="y", shape=(1 << 20, 1 << 11), dtype=DType.F32, role=Role.OUTPUT),  # 8 GiB
)


def launch(types: str, *values: str, prefix: str = "l", grid: str = "%one", attributes: str = "") -> str:
    """Text that launches @kernels_k with one parameter a value; `types` are their types, split at `;`."""
    lines = [f"%{prefix}c = llvm.alloca %one x {CONFIG} : (i32) -> !llvm.ptr"]
    for field, value, type_ in (
        ("0, 0", grid, "i32"), ("0, 1", "%one", "i32"), ("0, 2", "%one", "i32"), ("1, 0", "%threads", "i32"),
        ("1, 1", "%one", "i32"), ("1, 2", "%one", "i32"), ("2", "%smem", "i64"), ("3", "%arg2", "!llvm.ptr"),
        ("5", "%zero", "i32"),
    ):  # fmt: skip
        name = f"%{prefix}f{field.replace(', ', '_')}"
        lines += [
            f"{name} = llvm.getelementptr %{prefix}c[0, {field}] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}",
            f"llvm.store {value}, {name} : {type_}, !llvm.ptr",
        ]
    lines += [
        attributes,
        f"%{prefix}n = llvm.mlir.constant({len(values)} : i32) : i32",
        f"%{prefix}a = llvm.alloca %{prefix}n x !llvm.ptr : (i32) -> !llvm.ptr",
    ]
    for i, (value, type_) in enumerate(zip(values, types.split(";"), strict=True)):
        lines += [
            f"%{prefix}p{i} = llvm.alloca %one x {type_} : (i32) -> !llvm.ptr",
            f"llvm.store {value}, %{prefix}p{i} : {type_}, !llvm.ptr",
            f"%{prefix}q{i} = llvm.getelementptr %{prefix}a[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr",
            f"llvm.store %{prefix}p{i}, %{prefix}q{i} : !llvm.ptr, !llvm.ptr",
        ]
    return "\n".join([
        *lines,
        f"%{prefix}s = llvm.mlir.addressof @kernels_k : !llvm.ptr",
        f"%{prefix}h = llvm.load %{prefix}s : !llvm.ptr -> !llvm.ptr",
        f"%{prefix}r = llvm.call @_cudaLaunchKernelEx(%{prefix}c, %{prefix}h, %{prefix}a)"
        " : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32",
    ])  # fmt: skip


def module(body: str) -> str:
    """A host module whose function `f(x, y, stream)` holds `body` between some constants and a return."""
    constants = """
%zero = llvm.mlir.constant(0 : i32) : i32
%one = llvm.mlir.constant(1 : i32) : i32
%threads = llvm.mlir.constant(128 : i32) : i32
%smem = llvm.mlir.constant(4096 : i64) : i64
"""
    lines = [line for line in (constants + body + "\nllvm.return %zero : i32").splitlines() if line.strip()]
    inner = "\n".join(("  " if line.strip().startswith("^") else "    ") + line.strip() for line in lines)
    return (
        "module attributes {gpu.container_module} {\n"
        '  llvm.mlir.global internal constant @text("value %d of %lld\\0A\\00") {addr_space = 0 : i32}\n'
        f"  llvm.func @f(%arg0: {TENSOR}, %arg1: {TENSOR}, %arg2: !llvm.ptr) -> i32"
        " attributes {a = 1 : i32} {\n"
        f"{inner}\n  }}\n}}\n"
    )


def run(body: str) -> tuple[Launch, ...]:
    return recover_launches(module(body), "f", ("x", "y", "stream"), BUFFERS)


def test_one_launch() -> None:
    (found,) = run(launch(f"{TENSOR};i32", "%arg0", "%threads"))
    assert (found.kernel, found.grid, found.block, found.smem_bytes) == ("k", (1, 1, 1), (128, 1, 1), 4096)
    assert found.params[0].relocations == (Relocation(offset=0, buffer="x", addend=0),)
    assert found.params[0].data == "00" * 8 and found.params[1].data == "80000000"
    assert not found.pdl and not found.cooperative and found.cluster == (1, 1, 1)


def test_interpreted_at_given_arguments() -> None:
    dynamic = "!llvm.struct<(ptr<1>, struct<(struct<(i32, i32)>, i64)>)>"
    text = module(launch(f"{dynamic};f32", "%arg0", "%arg1")).replace(
        f"%arg0: {TENSOR}, %arg1: {TENSOR}", f"%arg0: {dynamic}, %arg1: f32"
    )
    (found,) = launches.interpret_launches(text, "f", ((0x7F00, 3, 5, -8), (0x40800000,), None))
    assert found.params == (struct.pack("<Qiiq", 0x7F00, 3, 5, -8), struct.pack("<f", 4.0))
    assert (found.kernel, found.grid, found.block) == ("k", (1, 1, 1), (128, 1, 1))
    with pytest.raises(CompileError, match="no tensor with a static layout"):
        launches.interpret_launches(text, "f", ((0x7F00, 3), (0x40800000,), None))
    with pytest.raises(CompileError, match="3 arguments for 2"):
        launches.interpret_launches(text, "f", ((0x7F00, 3, 5, 8), None))


def test_attributes() -> None:
    record = "!llvm.struct<(i32, array<4 x i8>, array<64 x i8>)>"
    lines = [
        "%three = llvm.mlir.constant(3 : i32) : i32",
        f"%at = llvm.alloca %three x {record} : (i32) -> !llvm.ptr",
    ]
    for i, (id_, values) in enumerate(((6, (1,)), (4, (2, 1, 1)), (2, (1,)))):
        lines += [
            f"%id{i} = llvm.mlir.constant({id_} : i32) : i32",
            f"%r{i} = llvm.getelementptr %at[{i}] : (!llvm.ptr) -> !llvm.ptr, {record}",
            f"llvm.store %id{i}, %r{i} : i32, !llvm.ptr",
        ]
        for j, v in enumerate(values):
            lines += [
                f"%v{i}_{j} = llvm.mlir.constant({v} : i32) : i32",
                f"%w{i}_{j} = llvm.getelementptr %r{i}[0, 2, {4 * j}] : (!llvm.ptr) -> !llvm.ptr, {record}",
                f"llvm.store %v{i}_{j}, %w{i}_{j} : i32, !llvm.ptr",
            ]
    lines += [
        f"%fa = llvm.getelementptr %lc[0, 4] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}",
        "llvm.store %at, %fa : !llvm.ptr, !llvm.ptr",
        f"%fn = llvm.getelementptr %lc[0, 5] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}",
        "llvm.store %three, %fn : i32, !llvm.ptr",
    ]
    (found,) = run(launch(TENSOR, "%arg0", attributes="\n".join(lines)))
    assert found.pdl and found.cooperative and found.cluster == (2, 1, 1)
    unknown = "\n".join(lines).replace("constant(6 : i32)", "constant(1 : i32)")
    with pytest.raises(CompileError, match="launch attribute 1"):
        run(launch(TENSOR, "%arg0", attributes=unknown))
    preferred = "\n".join(lines).replace("constant(6 : i32)", "constant(11 : i32)")
    with pytest.raises(CompileError, match="preferred cluster"):
        run(launch(TENSOR, "%arg0", attributes=preferred))


LOOP = """
%n = llvm.mlir.constant({n} : i32) : i32
llvm.br ^bb1(%zero : i32)
^bb1(%i: i32):  // 2 preds
%more = llvm.icmp "slt" %i, %n : i32
llvm.cond_br %more, ^bb2, ^bb3
^bb2:  // pred: ^bb1
%base = llvm.extractvalue %arg1[0] : {tensor}
%step = llvm.mlir.constant(-3 : i32) : i32
%back = llvm.mul %i, %step overflow<nsw> : i32
%end = llvm.mlir.constant(3000 : i64) : i64
%last = llvm.getelementptr %base[%end] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, f32
%row = llvm.getelementptr %last[%back] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
%u = llvm.mlir.poison : {tensor}
%v = llvm.insertvalue %row, %u[0] : {tensor}
%grid = llvm.add %i, %one : i32
{launch}
%next = llvm.add %i, %one : i32
llvm.br ^bb1(%next : i32)
^bb3:  // pred: ^bb1
"""


def test_loop_with_a_dynamic_grid_and_a_moving_pointer() -> None:
    body = LOOP.format(n=300, tensor=TENSOR, launch=launch(f"{TENSOR};i32", "%v", "%i", grid="%grid"))
    found = run(body)
    assert [f.grid[0] for f in found] == list(range(1, 301))
    assert [f.params[0].relocations[0].addend for f in found] == [4 * (3000 - 3 * i) for i in range(300)]
    assert all(f.params[0].relocations[0].buffer == "y" for f in found)


def test_endless_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_STEPS", 20_000)
    monkeypatch.setattr(launches, "MAX_LAUNCHES", 100)
    with pytest.raises(CompileError, match="launches"):
        run(LOOP.format(n=10**9, tensor=TENSOR, launch=launch("i32", "%i")))
    with pytest.raises(CompileError, match="operations") as caught:
        run("llvm.br ^bb1\n^bb1:\nllvm.br ^bb1\n^bb2:")
    assert caught.value.kind == "user"
    with pytest.raises(CompileError, match="stack"):
        run("%n = llvm.mlir.constant(2000000000 : i32) : i32\n%a = llvm.alloca %n x i64 : (i32) -> !llvm.ptr")


def wide(value: int) -> str:
    return f"%k = llvm.mlir.constant({value} : i64) : i64"


POINTER = f"%p = llvm.extractvalue %arg0[0] : {TENSOR}\n%i = llvm.ptrtoint %p : !llvm.ptr<1> to i64\n"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("%a = llvm.fadd %one, %one : f32", "compiler", "llvm.fadd is not known"),
        ("%a = llvm.frobnicate %one : i32", "compiler", "llvm.frobnicate"),
        ("%a = arith.addi %one, %one : i32", "compiler", "arith.addi"),
        ("%a = llvm.add %one, %nothing : i32", "compiler", "%nothing"),
        ("%a = llvm.call @system(%arg2) : (!llvm.ptr) -> i32", "compiler", "calls system"),
        ("%a = llvm.call @_cudaLaunchKernel(%arg2) : (!llvm.ptr) -> i32", "compiler", "_cudaLaunchKernel"),
        (f"%p = llvm.extractvalue %arg0[0] : {TENSOR}\n%a = llvm.load %p : !llvm.ptr<1> -> i32", "compiler",
         "not its own"),
        (f"%p = llvm.extractvalue %arg0[0] : {TENSOR}\nllvm.store %one, %p : i32, !llvm.ptr<1>", "compiler",
         "not its own"),
        ("%u = llvm.mlir.undef : i1\nllvm.cond_br %u, ^bb1, ^bb1\n^bb1:", "compiler", "undefined"),
        ("%a = llvm.sdiv %one, %zero : i32", "user", "divides by zero"),
        ("llvm.intr.trap\nllvm.unreachable\n^bb1:", "user", "trap"),
        ("llvm.return %one : i32\n^bb1:", "user", "error 1"),
        ("%m = llvm.mlir.addressof @text : !llvm.ptr\n%r = llvm.call @printf(%m, %threads, %smem) "
         "vararg(!llvm.func<i32 (ptr, ...)>) : (!llvm.ptr, i32, i64) -> i32", "user", "value 128 of 4096"),
        ("", "user", "launches no kernel"),
        (POINTER + "%g = llvm.trunc %i : i64 to i32\n" + launch("i32", "%one", grid="%g"), "user",
         "depends on"),
        (POINTER + f"{wide(36)}\n%j = llvm.lshr %i, %k : i64\n" + launch("i64", "%j"), "user",
         "in no buffer"),
        (POINTER + f"{wide(257)}\n%j = llvm.add %i, %k : i64\n" + launch("i64", "%j"), "user",
         "in no buffer"),
        (POINTER + "%j = llvm.trunc %i : i64 to i32\n" + launch("i32", "%j"), "user", "in no buffer"),
        (POINTER + "%j = llvm.sub %i, %smem : i64\n" + launch("i64", "%j"), "user", "in no buffer"),
        (POINTER + f"{wide(33)}\n%j = llvm.lshr %i, %k : i64\n%t = llvm.trunc %j : i64 to i32\n"
         + launch("i32", "%t"), "user", "in no buffer"),
        (launch("i32", "%one").replace("%arg2, %lf3", "%nullp, %lf3").replace(
            "%lc = ", "%nullp = llvm.mlir.zero : !llvm.ptr\n%lc = "), "user", "without `stream=stream`"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_not_allowed(body: str, kind: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        run(body)
    assert caught.value.kind == kind and message in caught.value.message


def test_end_of_a_buffer_is_in_it() -> None:
    body = (
        POINTER
        + "%k = llvm.mlir.constant(256 : i64) : i64\n%j = llvm.add %i, %k : i64\n"
        + launch("i64", "%j")
    )
    (found,) = run(body)
    assert found.params[0].relocations == (Relocation(offset=0, buffer="x", addend=256),)


def test_pointers_inside_structs_and_literals_between() -> None:
    type_ = "!llvm.struct<(i32, ptr<1>, i16, ptr<1>)>"
    body = f"""
%p = llvm.extractvalue %arg0[0] : {TENSOR}
%q = llvm.extractvalue %arg1[0] : {TENSOR}
%h = llvm.mlir.constant(-2 : i16) : i16
%u = llvm.mlir.undef : {type_}
%u0 = llvm.insertvalue %threads, %u[0] : {type_}
%u1 = llvm.insertvalue %q, %u0[1] : {type_}
%u2 = llvm.insertvalue %h, %u1[2] : {type_}
%u3 = llvm.insertvalue %p, %u2[3] : {type_}
{launch(type_, "%u3")}
"""
    (found,) = run(body)
    assert [(r.offset, r.buffer) for r in found.params[0].relocations] == [(8, "y"), (24, "x")]
    assert found.params[0].data == "8000000000000000" + "00" * 8 + "feff000000000000" + "00" * 8


@pytest.mark.parametrize(
    ("op", "a", "b", "expected"),
    [
        ("add", 2**31 - 1, 1, 2**31), ("sub", 0, 1, 2**32 - 1), ("mul", -3, 5, -15), ("sdiv", -7, 2, -3),
        ("srem", -7, 2, -1), ("udiv", -1, 2, 2**31 - 1), ("urem", -1, 10, 5), ("and", -4, 6, 4),
        ("or", 4, 3, 7), ("xor", -1, 1, -2), ("shl", 1, 31, 2**31), ("lshr", -1, 28, 15),
        ("ashr", -16, 2, -4),
    ],
)  # fmt: skip
def test_arithmetic(op: str, a: int, b: int, expected: int) -> None:
    body = f"""
%a = llvm.mlir.constant({a} : i32) : i32
%b = llvm.mlir.constant({b} : i32) : i32
%c = llvm.{op} %a, %b : i32
{launch("i32", "%c")}
"""
    (found,) = run(body)
    assert found.params[0].data == (expected & 0xFFFFFFFF).to_bytes(4, "little").hex()


@pytest.mark.parametrize(
    ("line", "type_", "data"),
    [
        ("%c = llvm.mlir.constant(2.500000e+00 : f32) : f32", "f32", struct.pack("<f", 2.5)),
        ("%c = llvm.mlir.constant(-1.250000e-01 : f64) : f64", "f64", struct.pack("<d", -0.125)),
        ("%c = llvm.mlir.constant(1.500000e+00 : f16) : f16", "f16", struct.pack("<e", 1.5)),
        ("%c = llvm.mlir.constant(1.000000e-05 : bf16) : bf16", "bf16", bytes.fromhex("2837")),
        ("%c = llvm.mlir.constant(0x7FC00000 : f32) : f32", "f32", bytes.fromhex("0000c07f")),
        ("%c = llvm.mlir.constant(true) : i1", "i1", b"\1"),
        ("%c = llvm.mlir.constant(-1 : i8) : i8", "i8", b"\xff"),
        ("%h = llvm.mlir.constant(-2 : i16) : i16\n%c = llvm.sext %h : i16 to i32", "i32",
         b"\xfe\xff\xff\xff"),
        ("%h = llvm.mlir.constant(-2 : i16) : i16\n%c = llvm.zext nneg %h : i16 to i32", "i32",
         b"\xfe\xff\0\0"),
        ('%b = llvm.icmp "ult" %one, %threads : i32\n%c = llvm.select %b, %threads, %zero : i1, i32', "i32",
         b"\x80\0\0\0"),
        ('%s = llvm.mlir.constant("ab\\00") : !llvm.array<3 x i8>\n'
         "%c = llvm.extractvalue %s[1] : !llvm.array<3 x i8>", "i8", b"b"),
    ],
)  # fmt: skip
def test_values(line: str, type_: str, data: bytes) -> None:
    (found,) = run(line + "\n" + launch(type_, "%c"))
    assert bytes.fromhex(found.params[0].data) == data


@pytest.mark.parametrize(
    ("text", "size", "align"),
    [
        ("i1", 1, 1), ("i24", 3, 4), ("f64", 8, 8), ("!llvm.ptr<1>", 8, 8), ("!llvm.struct<()>", 0, 1),
        ("!llvm.struct<(i8, i32, i8)>", 12, 4), ("!llvm.struct<packed (i8, i32, i8)>", 6, 1),
        ("!llvm.array<3 x struct<(i8, i16)>>", 12, 2), (TENSOR, 8, 8), (CONFIG, 56, 8),
        ("!llvm.struct<(struct<(struct<(array<16 x i64>)>)>)>", 128, 8),
    ],
)  # fmt: skip
def test_layout_of_types(text: str, size: int, align: int) -> None:
    type_ = parse_type(text)
    assert (type_.size, type_.align) == (size, align)


@pytest.mark.parametrize(
    "text", ["", "tensor<4xf32>", "!llvm.struct<(i32", "!llvm.array<x i8>", "i32 i32", "(" * 500]
)
def test_unknown_types_are_errors(text: str) -> None:
    with pytest.raises(HostCodeError):
        parse_type(text)


TYPES = st.recursive(
    st.sampled_from(["i8", "i16", "i32", "i64", "f32", "bf16", "ptr", "ptr<1>"]),
    lambda t: st.one_of(
        st.lists(t, max_size=4).map(lambda f: f"struct<({', '.join(f)})>"),
        st.tuples(st.integers(1, 4), t).map(lambda a: f"array<{a[0]} x {a[1]}>"),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(TYPES, st.data())
def test_values_survive_memory(text: str, data: st.DataObject) -> None:
    type_ = parse_type(f"!llvm.{text}" if text[0] in "sap" else text)
    raw = data.draw(st.binary(min_size=type_.size, max_size=type_.size))
    value = decode(type_, raw)
    again = encode(type_, value)
    assert len(again) == type_.size and decode(type_, again) == value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbled_text_is_a_typed_failure(data: st.DataObject) -> None:
    text = module(LOOP.format(n=2, tensor=TENSOR, launch=launch(f"{TENSOR};i32", "%v", "%i", grid="%grid")))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 40)) :]
    try:
        recover_launches(text, "f", ("x", "y", "stream"), BUFFERS)
    except CompileError as e:
        assert e.kind in ("compiler", "user")


def test_missing_function_and_wrong_arity() -> None:
    for function, parameters in (("g", ("x", "y", "stream")), ("f", ("x", "stream"))):
        with pytest.raises(CompileError, match="cannot be recovered"):
            recover_launches(module(""), function, parameters, BUFFERS)
    with pytest.raises(HostCodeError):
        read_module("")


TMA = """
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync


class Load:
    @cute.kernel
    def kernel(self, tma: cute.CopyAtom, g: cute.Tensor, layout: cute.ComposedLayout, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        s = smem.allocate_tensor(Float32, layout.outer, 128, swizzle=layout.inner)
        bar = smem.allocate_array(Int64, 1)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile = cute.local_tile(g, (5, 32), (0, bid))
        ts, tg = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tile, 0, 2)
        )
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 5 * 32 * 4)
        cute.copy(tma, tg, ts, tma_bar_ptr=bar)
        cute.arch.mbarrier_wait(bar, 0)
        out[0, tid] = s[0, tid % 32]

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        layout = cute.make_composed_layout(
            cute.make_swizzle(0, 4, 3), 0, cute.make_layout((5, 32), stride=(32, 1))
        )
        atom, g = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (5, 32))
        self.kernel(atom, g, layout, out).launch(grid=[2, 1, 1], block=[64, 1, 1], stream=stream)


def build(axes, knobs):
    return Load()
"""


@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
def test_tensor_map_is_a_parameter_with_its_address(server: CompileServer, arch: str) -> None:
    (found,) = compile_candidate(request(TMA, arch), server=server).launches
    assert [p.size for p in found.params] == [128, 8]
    assert found.params[0].relocations == (Relocation(offset=0, buffer="x", addend=0),)
    assert found.params[1].relocations == (Relocation(offset=0, buffer="out", addend=0),)
    words = struct.unpack("<32I", bytes.fromhex(found.params[0].data))
    assert 255 in words and 4 in words  # the extents 256 and 5 of the tensor, less one
    assert found.smem_bytes == 5 * 32 * 4 + 8
