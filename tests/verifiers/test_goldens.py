"""Goldens against a second implementation: plain Python loops over NumPy float64, one element at a time.

Nothing is shared with the verifiers but the inputs: MXFP4 goes through ml_dtypes, bfloat16 rounding
through exact fractions, the order of experts through Python's sort.
"""

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from workbench.ops import Op, load_op
from workbench.ops.trivial import zero_inputs
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])


def inputs_of(
    op: Op, workload: str, generator: str, seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    axes = dict(op.workload(workload).axes)
    storage = zero_inputs(op, axes)
    op.generators[generator](axes, seed, storage.__getitem__)
    return storage, axes


def bf16(x: float) -> float:
    """Nearest bfloat16, ties to even, from the exact value of a float64."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 8, -133)  # 8 significant bits; subnormals are multiples of 2^-133
    return float(round(Fraction(x) / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def numbers(t: torch.Tensor) -> np.ndarray:
    return t.double().numpy()


def sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x)) if x > -700 else 0.0


def situ(g: float, u: float) -> float:
    return 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25)


def matrix(packed: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    raw = packed.numpy()
    values = np.empty((raw.shape[0], raw.shape[1] * 2))
    values[:, 0::2] = (raw & 15).view(ml_dtypes.float4_e2m1fn)
    values[:, 1::2] = (raw >> 4).view(ml_dtypes.float4_e2m1fn)
    for block, column in enumerate(scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).T):
        values[:, 32 * block : 32 * block + 32] *= column[:, None]
    return values


def expert_row(t: dict[str, torch.Tensor], e: int, latent: np.ndarray) -> list[float]:
    """bf16(W2 bf16(situ(W13 latent))) of one expert, exactly summed."""
    w13, w2 = matrix(t["w13"][e], t["w13_scale"][e]), matrix(t["w2"][e], t["w2_scale"][e])
    width = w13.shape[0] // 2
    sums = [total(row * latent) for row in w13]
    hidden = np.array([bf16(situ(sums[i], sums[width + i])) for i in range(width)])
    return [bf16(total(row * hidden)) for row in w2]


def total(terms: np.ndarray) -> float:
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):  # infinities of both signs
        return float(np.sum(terms))


def chosen(logits: list[float], bias: np.ndarray, k: int) -> tuple[list[int], list[float]]:
    scores = [math.nan if math.isnan(x) else sigmoid(x) for x in logits]
    keys = [float(np.float32(np.float32(s) + np.float32(b))) for s, b in zip(scores, bias, strict=True)]
    order = sorted((e for e in range(len(keys)) if not math.isnan(keys[e])), key=lambda e: (-keys[e], e))
    order += [e for e in range(len(keys)) if math.isnan(keys[e])]
    ids = order[:k]
    total_score = (
        math.fsum(scores[e] for e in ids) if not any(math.isnan(scores[e]) for e in ids) else math.nan
    )
    return ids, [bf16(scores[e] / (total_score + 1e-20)) for e in ids]


def close(got: torch.Tensor, want: list, steps: int = 0) -> None:
    """Equal, NaN and infinities included; `steps` elements may differ by one bfloat16 step.

    Two correct float64 computations may fall on either side of a rounding boundary, seldom.
    """
    g, w = numbers(got), np.array(want, dtype=np.float64)
    assert g.shape == w.shape
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    assert int((~same).sum()) <= steps
    np.testing.assert_allclose(g[~same], w[~same], rtol=2**-7)


OPS = {name: load_op(WORKSPACE, name) for name in WORKSPACE.op_names()}
CASES = [
    (name, w.name, g) for name, op in OPS.items() for w in op.workloads if not w.real for g in op.generators
]


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "rmsnorm"])
def test_rmsnorm(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    x, weight = numbers(t["x"]), numbers(t["weight"])
    want = []
    for row in x:
        mean = math.fsum(v * v for v in row) / len(row)
        want.append([bf16(v / math.sqrt(mean + 1e-5) * w) for v, w in zip(row, weight, strict=True)])
    close(OPS[name].reference(t, axes)["out"], want, steps=1)


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "moe_topk"])
def test_topk(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    out = OPS[name].reference(t, axes)
    rows = [chosen(row.tolist(), t["bias"].numpy(), axes["K"]) for row in t["logits"].double()]
    assert out["ids"].tolist() == [ids for ids, _ in rows]
    close(out["weights"], [weights for _, weights in rows], steps=1)


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "moe_experts"])
def test_experts(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    latent = numbers(t["latent"])
    with np.errstate(invalid="ignore"):
        want = [[expert_row(t, int(e), latent[b]) for e in t["ids"][b]] for b in range(axes["B"])]
    close(OPS[name].reference(t, axes)["expanded"], want, steps=2)


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "moe"])
def test_moe(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    x, latent = numbers(t["x"]), numbers(t["latent"]).copy()
    router, down = numbers(t["w_router"]), numbers(t["w_down"])
    out = []
    with np.errstate(invalid="ignore"):
        for b in range(axes["B"]):
            latent[b, : axes["D"]] = [bf16(total(row * x[b])) for row in down]
            ids, weights = chosen([total(row * x[b]) for row in router], t["bias"].numpy(), axes["K"])
            rows = np.array([expert_row(t, e, latent[b]) for e in ids])
            out.append([bf16(total(np.array(weights) * column)) for column in rows.T])
    got = OPS[name].reference(t, axes)
    close(got["latent"], latent.tolist(), steps=1)
    close(got["out"], out, steps=3)


def e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def mx(row: np.ndarray, floor: bool) -> np.ndarray:
    """A row through MXFP8: the scale puts the largest magnitude of each block below 2^9."""
    out = np.zeros_like(row)
    for first in range(0, len(row), 32):
        block = row[first : first + 32]
        largest = float(np.abs(block).max())
        if largest == 0:
            continue
        mantissa, power = math.frexp(largest)  # largest = mantissa * 2^power, mantissa in [0.5, 1)
        power -= 9 if floor or mantissa <= 0.875 else 8
        out[first : first + 32] = e4m3(block / 2.0**power) * 2.0**power
    return out


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "moe_experts_mx"])
def test_experts_with_quantised_activations(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    width, want = axes["I"], []
    for b, row in enumerate(numbers(t["latent"])):
        x, rows = mx(row, floor=False), []
        for e in t["ids"][b].tolist():
            sums = [total(r * x) for r in matrix(t["w13"][e], t["w13_scale"][e])]
            hidden = np.array([situ(g, u) for g, u in zip(sums[:width], sums[width:], strict=True)])
            hidden = mx(hidden, floor=True)
            rows.append([bf16(total(r * hidden)) for r in matrix(t["w2"][e], t["w2_scale"][e])])
        want.append(rows)
    close(OPS[name].reference(t, axes)["expanded"], want, steps=4)


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "mla_value"])
def test_mla_value(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    n, d, want = {k: numbers(v) for k, v in t.items()}, axes["D"], []
    for b in range(axes["B"]):
        row = []
        for h in range(axes["H"]):
            gates = n["projected"][b, axes["G"] + h * d : axes["G"] + h * d + d].tolist()
            values = [bf16(total(r * n["latent"][b, h])) for r in n["kv_b"][h, d:]]
            row += [bf16(v * sigmoid(g)) for v, g in zip(values, gates, strict=True)]
        want.append(row if n["lengths"][b] > 0 else [0.0] * len(row))
    close(OPS[name].reference(t, axes)["out"], want, steps=1)


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "mla_query"])
def test_mla_query(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    n, (q, latent, d) = {k: numbers(v) for k, v in t.items()}, (axes["Q"], axes["L"], axes["D"])
    cache, query = n["cache"].reshape(-1, latent + axes["R"]), []
    for b, x in enumerate(n["projected"]):
        low = np.array([bf16(v * w) for v, w in zip(norm(x[:q].tolist()), n["q_norm"], strict=True)])
        row = [bf16(v * w) for v, w in zip(norm(x[q : q + latent].tolist()), n["kv_norm"], strict=True)]
        row += x[q + latent : q + latent + axes["R"]].tolist()
        if n["slots"][b] >= 0:
            cache[int(n["slots"][b])] = e4m3(np.array(row) * n["k_inv"])
        heads = np.array([bf16(total(w * low)) for w in n["qb"]]).reshape(axes["H"], -1)
        query.append([
            e4m3(np.array([*(bf16(total(c * head[:d])) for c in uk.T), *head[d:]]) * n["q_inv"])
            for head, uk in zip(heads, n["uk"], strict=True)
        ])  # fmt: skip
    got = OPS[name].reference(t, axes)
    wrong = numbers(got["query"]) != np.array(query)
    assert wrong.sum() <= 1
    assert (numbers(got["cache"]).reshape(cache.shape) != cache).sum() <= 1


PRODUCTS = [c for c in CASES if c[0] in ("skinny_gemm", "splitk_gemm", "o_proj")]


@pytest.mark.parametrize(("name", "workload", "generator"), PRODUCTS)
def test_products(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    x, weight = numbers(t["x"]), numbers(t["weight"])
    with np.errstate(invalid="ignore"):
        want = [[bf16(total(row * w)) for w in weight] for row in x]
    got = OPS[name].reference(t, axes)["out"]
    close(got, want, steps=2)
    if name == "o_proj":
        assert not torch.signbit(got[got == 0]).any()


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "situ"])
def test_situ(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    width = axes["I"]
    want = []
    for row in numbers(t["gate_up"]).tolist():
        pairs = zip(row[:width], row[width:], strict=True)
        want.append([bf16(situ(g, u)) for g, u in pairs] + [0.0] * (axes["P"] - width))
    close(OPS[name].reference(t, axes)["out"], want, steps=2)


def norm(values: list[float]) -> list[float]:
    scale = math.sqrt(total(np.square(values)) / len(values) + 1e-5)
    return [v / scale for v in values]


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "attn_res"])
def test_attention_residual(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    n = {k: numbers(v) for k, v in t.items()}
    saved, out, prefix, blocks = axes["V"] - 1, [], [], n["blocks"].copy()
    for b in range(axes["B"]):
        p = [bf16(x + y) for x, y in zip(n["prefix"][b].tolist(), n["delta"][b].tolist(), strict=True)]
        rows = [*blocks[b, :saved].tolist(), p]
        logits = [total(np.array(norm(r)) * n["norm"] * n["query"]) for r in rows]
        top = max(logits) if not any(map(math.isnan, logits)) else math.nan
        weights = [math.exp(x - top) for x in logits]
        mix = [total(np.array(weights) * column) / math.fsum(weights) for column in np.array(rows).T]
        out.append([bf16(x * w) for x, w in zip(norm(mix), n["out_norm"].tolist(), strict=True)])
        prefix.append(p)
        if axes["A"] == axes["V"]:
            blocks[b, saved] = p
    got = OPS[name].reference(t, axes)
    close(got["out"], out, steps=2)
    close(got["prefix"], prefix)
    close(got["blocks"], blocks.tolist())


def kda_head(n: dict[str, np.ndarray], b: int, h: int, heads: int, d: int) -> tuple[list[float], np.ndarray]:
    """One token and head: output and new state."""
    slot, width, row = int(n["slots"][b]), heads * d, n["projected"][b]
    parts = []
    for part in range(3):
        first = part * width + h * d
        raw = [*n["conv"][slot, :, first : first + d], row[first : first + d]]
        taps = n["conv_weight"][part, :, h * d : h * d + d]
        c = [math.fsum(taps[i, j] * raw[i][j] for i in range(4)) for j in range(d)]
        parts.append([x * sigmoid(x) if not math.isnan(x) else x for x in c])
    q, k = (np.array(p) / math.sqrt(math.fsum(np.square(p)) + 1e-6) for p in parts[:2])
    f_a = row[4 * width : 4 * width + d]
    g = [bf16(math.fsum(f_a * w)) for w in n["fb"][h * d : h * d + d]]
    slope = math.exp(n["a_log"][h])
    decay = np.array([
        math.exp(-5 * sigmoid(slope * (x + y))) for x, y in zip(g, n["dt_bias"][h * d :], strict=False)
    ])  # fmt: skip
    state = n["state"][slot, h] * decay
    beta = sigmoid(float(row[4 * width + d + h]))
    state = np.array([
        r + beta * (v - total(r * k)) * k for r, v in zip(state, parts[2], strict=True)
    ])  # fmt: skip
    o = norm([total(r * q) / math.sqrt(d) for r in state])
    gate = [sigmoid(float(x)) for x in row[3 * width + h * d : 3 * width + h * d + d]]
    return [bf16(x * w * y) for x, w, y in zip(o, n["norm"].tolist(), gate, strict=True)], state


@pytest.mark.parametrize(("name", "workload", "generator"), [c for c in CASES if c[0] == "kda"])
def test_kda(name: str, workload: str, generator: str) -> None:
    t, axes = inputs_of(OPS[name], workload, generator)
    n = {k: numbers(v) for k, v in t.items()}
    h, d = axes["H"], axes["D"]
    state, conv, out = n["state"].copy(), n["conv"].copy(), np.zeros((axes["B"], h * d))
    for b, slot in enumerate(t["slots"].tolist()):
        if slot <= 0:
            continue
        for head in range(h):
            out[b, head * d : head * d + d], state[slot, head] = kda_head(n, b, head, h, d)
        conv[slot] = [*n["conv"][slot, 1:], n["projected"][b, : 3 * h * d]]
    got = OPS[name].reference(t, axes)
    close(got["out"], out.tolist(), steps=2)
    close(got["conv"], conv.tolist())
    np.testing.assert_allclose(numbers(got["state"]), state, rtol=1e-9, atol=1e-12 * np.nanmax(np.abs(state)))


def test_bf16_of_this_file() -> None:
    x = np.random.default_rng(1).standard_normal(2000).astype(np.float32)
    x = np.concatenate([x, x * np.float32(1e-39), [np.float32(1 + 2**-8), np.float32(1 + 3 * 2**-8)]])
    want = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert [bf16(float(v)) for v in x] == want.tolist()
