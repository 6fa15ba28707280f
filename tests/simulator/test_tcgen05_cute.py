"""CuTe DSL kernels with tcgen05 run from their PTX and compared with NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.simulator.tcgen05_cute import GEMM, PIPELINE, SCALED, STORED, edited
from tests.simulator.test_tcgen05 import SMALL, scale_image, values_of
from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.simulator import Memory, Outcome, simulate


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s


def compiled(
    server: CompileServer,
    source: str,
    axes: dict[str, Any],
    buffers: list[tuple[str, tuple[int, ...], str, str]],
) -> Artifact:
    bound = tuple(BoundBuffer(name=n, shape=s, dtype=d, role=r) for n, s, d, r in buffers)
    return compile_candidate(
        CompileRequest(
            op="gemm",
            workload="tile",
            axes=axes,
            template="test",
            knobs={},
            arch="sm_103a",
            source=source,
            buffers=bound,
        ),
        server=server,
    )


def executed(artifact: Artifact, inputs: dict[str, Any], shape: tuple[int, int]) -> tuple[Outcome, Any]:
    memory = Memory(1 << 26)
    for name, array in inputs.items():
        memory.allocate(name, array.nbytes, initialized=True)[:] = array.view(np.uint8).ravel()
    memory.allocate("c", shape[0] * shape[1] * 4)
    outcome = simulate(artifact, memory)
    return outcome, memory.view("c").view(np.float32).reshape(shape)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (256, 128)])
def test_f16_gemm(server, n, k):
    buffers = [
        ("a", (128, k), "f16", "activation"),
        ("b", (n, k), "f16", "weight"),
        ("c", (128, n), "f32", "output"),
    ]
    artifact = compiled(server, GEMM, {"M": 128, "N": n, "K": k}, buffers)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((128, k)).astype(np.float16)
    b = rng.standard_normal((n, k)).astype(np.float16)
    outcome, c = executed(artifact, {"a": a, "b": b}, (128, n))
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5)


LOADS = {
    "16x256b": "Ld16x256bOp(tcgen05.Repetition.x8)",
    "16x128b": "Ld16x128bOp(tcgen05.Repetition.x4)",
    "16x64b": "Ld16x64bOp(tcgen05.Repetition.x8)",
    "16x32bx2": "Ld16x32bx2Op(tcgen05.Repetition.x16)",
}


@pytest.mark.parametrize("shape", LOADS)
def test_64_rows_through_every_load_shape(server, shape):
    """CuTe DSL's own layouts of accumulators and register fragments agree with the simulator's."""
    source = GEMM.replace("Ld32x32bOp(tcgen05.Repetition.x32)", LOADS[shape])
    assert source != GEMM
    square = [(name, (64, 64), "f16", role) for name, role in (("a", "activation"), ("b", "weight"))]
    artifact = compiled(
        server, source, {"M": 64, "N": 64, "K": 64}, [*square, ("c", (64, 64), "f32", "output")]
    )
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    outcome, c = executed(artifact, {"a": a, "b": b}, (64, 64))
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (256, 64), (32, 32)])
def test_mn_major_gemm(server, n, k):
    """Operands whose rows along K are contiguous along M and N; CuTe DSL chooses swizzle and descriptors."""
    source = GEMM
    layout = "cute.make_layout((self.{2}, self.k), stride=(1, self.{2}))"
    turned = "partition_{0}(cute.make_tensor({1}.iterator, " + layout + "))"
    for old, new in (
        ("tcgen05.OperandMajorMode.K", "tcgen05.OperandMajorMode.MN"),
        ("partition_A(a)", turned.format("A", "a", "m")),
        ("partition_B(b)", turned.format("B", "b", "n")),
    ):  # fmt: skip
        assert old in source
        source = source.replace(old, new)
    buffers = [
        ("a", (k, 128), "f16", "activation"),
        ("b", (k, n), "f16", "weight"),
        ("c", (128, n), "f32", "output"),
    ]
    artifact = compiled(server, source, {"M": 128, "N": n, "K": k}, buffers)
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((k, size)).astype(np.float16) for size in (128, n))
    outcome, c = executed(artifact, {"a": a, "b": b}, (128, n))
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, a.astype(np.float64).T @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "vector", "k"), [(8, 32, 128), (4, 32, 256), (4, 16, 256)])
def test_block_scaled_gemm(server, bits, vector, k):
    """mxf8, mxf4 and nvf4, their scale factors copied to tensor memory by tcgen05.cp."""
    size, count = (128, k * bits // 8), 128 * k // vector
    buffers = [
        ("a", size, "u8", "activation"),
        ("b", size, "u8", "weight"),
        ("fa", (count,), "u8", "activation"),
        ("fb", (count,), "u8", "weight"),
        ("c", (128, 128), "f32", "output"),
    ]
    artifact = compiled(server, SCALED, {"M": 128, "N": 128, "K": k, "bits": bits, "vec": vector}, buffers)
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    values = []
    for name in ("a", "b"):
        if bits == 8:
            codes = rng.integers(0, 256, (128, k), dtype=np.uint8) & np.uint8(0xBF)
            inputs[name] = codes
            numbers = values_of(codes, *SMALL["e4m3"])
        else:
            codes = rng.integers(0, 16, (128, k), dtype=np.uint8)
            inputs[name] = codes[:, ::2] | codes[:, 1::2] << 4
            numbers = values_of(codes, *SMALL["e2m1"])
        if vector == 32:
            scales = rng.integers(120, 134, (128, k // vector), dtype=np.uint8)
            factors = 2.0 ** (scales.astype(int) - 127)
        else:
            scales = rng.integers(8, 120, (128, k // vector), dtype=np.uint8)
            factors = values_of(scales, *SMALL["e4m3"])
        chunks = [scale_image(scales[:, j : j + 4]) for j in range(0, k // vector, 4)]
        inputs["f" + name] = np.concatenate(chunks)
        values.append(numbers * np.repeat(factors, vector, axis=1))
    outcome, c = executed(artifact, inputs, (128, 128))
    assert outcome.completed and outcome.findings == ()
    want = values[0] @ values[1].T
    np.testing.assert_allclose(c, want, rtol=1e-6, atol=1e-6 * float(np.abs(want).max()))


def test_a_missing_wait_is_a_finding(server):
    """The epilogue reads the accumulator without waiting for the commit's barrier."""
    source = GEMM.replace("        C.mbarrier_wait(bar, 0)\n", "        C.sync_threads()\n")
    assert source != GEMM
    buffers = [
        ("a", (128, 64), "f16", "activation"),
        ("b", (64, 64), "f16", "weight"),
        ("c", (128, 64), "f32", "output"),
    ]
    artifact = compiled(server, source, {"M": 128, "N": 64, "K": 64}, buffers)
    ones = {"a": np.ones((128, 64), np.float16), "b": np.ones((64, 64), np.float16)}
    outcome, _ = executed(artifact, ones, (128, 64))
    assert "tcgen05-order" in {f.rule for f in outcome.findings}


# -- TMA, a multi-stage pipeline and warp roles, on one CTA or a pair a tile ------------------------


def pipelined(server, ctas, source=PIPELINE, k=448):
    m = n = 256
    buffers = [
        ("a", (m, k), "f16", "activation"),
        ("b", (n, k), "f16", "weight"),
        ("c", (m, n), "f32", "output"),
    ]
    axes = {"M": m, "N": n, "K": k, "TN": 128, "ctas": ctas, "stages": 3}
    artifact = compiled(server, source, axes, buffers)
    rng = np.random.default_rng(ctas)
    a, b = (rng.standard_normal((256, k)).astype(np.float16) for _ in range(2))
    outcome, c = executed(artifact, {"a": a, "b": b}, (m, n))
    return outcome, c, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("ctas", [1, 2])
def test_pipelined_gemm(server, ctas):
    outcome, c, want = pipelined(server, ctas)
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=5e-5)


FAULTS = {
    "phase": (
        (
            ("full = acc_consumer.wait_and_advance()", "C.mbarrier_wait(acc_bars, 1)"),
            ("            with C.elect_one():\n                full.release()\n", ""),
            ("            acc_producer.tail()\n", ""),
        ),
        {"tcgen05-order", "uninitialized-read"},
    ),
    "too few bytes expected": (
        (("tx_count=tx,", "tx_count=tx // 2,"),),
        {"mbarrier-phase", "uninitialized-read", "deadlock"},
    ),
    "too many bytes expected": ((("tx_count=tx,", "tx_count=tx + 16,"),), {"mbarrier-phase"}),
    "stage reuse": (
        (
            ("                    handle.release()\n                empty", "                empty"),
            ("                    tm.set(tcgen05.Field.ACCUMULATE, k != 0)\n",
             "                    handle.release()\n"
             "                    tm.set(tcgen05.Field.ACCUMULATE, k != 0)\n"),
        ),
        {"buffer-reuse"},
    ),
    "leak": ((("            tmem.free(pointer)\n", ""),), {"tmem-lifetime"}),
    "plain arrive in place of the commit": (
        (("                empty.commit()\n",
          "                with C.elect_one():\n                    C.mbarrier_arrive(acc_bars)\n"),),
        {"tcgen05-order"},
    ),
}  # fmt: skip
"""Replacements in the source, and rules of which one has to report them."""


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(server, ctas, fault):
    changes, rules = FAULTS[fault]
    outcome, _, _ = pipelined(server, ctas, edited(PIPELINE, *changes))
    assert rules & {f.rule for f in outcome.findings}, outcome.findings


# -- fences between ordinary stores and the asynchronous proxy ----------------------------------------

FENCE = 'C.fence_proxy("async.shared", space="cta")\n'


@pytest.mark.parametrize("ctas", [1, 2])
def test_pipelined_gemm_with_a_tma_store(server, ctas):
    outcome, c, want = pipelined(server, ctas, STORED)
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("instead", ["", "C.fence_acq_rel_cta()\n"])
def test_a_tma_store_without_the_proxy_fence_is_found(server, ctas, instead):
    """The epilogue's stores to shared memory are not visible to the copy engine; no other fence will do."""
    outcome, _, _ = pipelined(
        server, ctas, edited(STORED, (" " * 12 + FENCE, instead and " " * 12 + instead))
    )
    found = {f.rule for f in outcome.findings}
    assert "proxy-fence-missing" in found, outcome.findings


@pytest.mark.parametrize("ctas", [1, 2])
def test_a_tma_store_before_the_barrier_is_found(server, ctas):
    """The fences are there, but the issuing warp does not wait for the other warps' stores."""
    barrier = "            pipeline.NamedBarrier(barrier_id=1, num_threads=128).arrive_and_wait()\n"
    outcome, _, _ = pipelined(server, ctas, edited(STORED, (barrier, "")))
    assert {"race", "proxy-fence-missing"} & {f.rule for f in outcome.findings}, outcome.findings


def test_mma_of_ordinary_stores_without_the_proxy_fence_is_found(server):
    """tcgen05.mma reads operands that threads stored."""
    buffers = [
        ("a", (128, 64), "f16", "activation"),
        ("b", (64, 64), "f16", "weight"),
        ("c", (128, 64), "f32", "output"),
    ]
    artifact = compiled(server, edited(GEMM, ("        " + FENCE, "")), {"M": 128, "N": 64, "K": 64}, buffers)
    ones = {"a": np.ones((128, 64), np.float16), "b": np.ones((64, 64), np.float16)}
    outcome, _ = executed(artifact, ones, (128, 64))
    assert "proxy-fence-missing" in {f.rule for f in outcome.findings}
