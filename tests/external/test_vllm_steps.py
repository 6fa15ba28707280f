"""The package's steps against vLLM's own rules, which are run as they stand in the installed wheel.

Only the functions concerned are taken out of vLLM's modules: they are pure, and importing the modules wants a
GPU's packages.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import random
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from workbench.export.module.k3_decode.steps import (
    DRAFTS,
    MAX_ROWS,
    Counts,
    captured,
    prepared,
    recognise,
    smallest,
)

TOKENS = (1, *(1 + n for n in DRAFTS))


def taken(module: str, *names: str, **given: Any) -> SimpleNamespace:
    """Functions and classes of a module of vLLM, compiled alone; of a class `C.f` the method `f`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / module).read_text())
    found: list[ast.stmt] = [ast.parse("from __future__ import annotations").body[0]]
    for name in names:
        body: list[ast.stmt] = tree.body
        for part in name.split("."):
            (node,) = [n for n in body if getattr(n, "name", None) == part]
            body = getattr(node, "body", [])
        found.append(node)
    space: dict[str, Any] = dict(given)
    exec(compile(ast.Module(found, []), module, "exec"), space)
    return SimpleNamespace(**{name.rpartition(".")[2]: space[name.rpartition(".")[2]] for name in names})


class Mode(Enum):
    """The values of vLLM's `CUDAGraphMode` that occur."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


def manager(sizes: list[int], tokens: int, max_requests: int) -> Any:
    """vLLM's table of graphs, made by its own code, and its choice among them."""
    found = taken(
        "v1/worker/gpu/cudagraph_utils.py",
        "BatchExecutionDescriptor", "_is_compatible", "CudaGraphManager._init_candidates",
        "CudaGraphManager.dispatch",
        dataclass=dataclass, defaultdict=defaultdict, groupby=groupby, product=product, CUDAGraphMode=Mode,
        round_up=lambda n, of: -(-n // of) * of, __name__=__name__,
    )  # fmt: skip
    mode = SimpleNamespace(
        decode_mode=lambda: Mode.FULL, mixed_mode=lambda: Mode.PIECEWISE, separate_routine=lambda: True
    )
    cache = SimpleNamespace(use_kda_recoverssm=False)
    made = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        max_num_reqs=max_requests,
        decode_query_len=tokens,
        cudagraph_mode=mode,
        vllm_config=SimpleNamespace(speculative_config=None, cache_config=cache),
        varlen_decode=False,
        lora_capture_cases=[0],
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
        _maybe_ubatch_twin=lambda desc: None,
        _resolve_effective_loras=lambda n: n,
    )
    found._init_candidates(made)
    made.graphs_of = lambda: [d for d in made._capture_descs.get(Mode.FULL, []) if d.uniform_token_count]
    made.chosen = lambda requests: found.dispatch(made, requests, requests * tokens, tokens, 0)
    return made


@pytest.mark.parametrize("tokens", TOKENS)
def test_captured_sizes_and_the_choice_among_them_are_vllms(tokens: int) -> None:
    rng = random.Random(tokens)
    for _ in range(60):
        sizes = sorted(rng.sample(range(1, 65), rng.randint(1, 20)))
        max_requests = rng.randint(1, 64)
        theirs = manager(sizes, tokens, max_requests)
        ours = captured(sizes, tokens, max_requests=max_requests, max_rows=max(sizes))
        graphs = {(d.num_reqs, d.num_tokens) for d in theirs.graphs_of()}
        assert graphs == {(s.requests, s.rows) for s in ours}, (sizes, max_requests)
        for requests in range(1, max_requests + 1):
            chosen, step = theirs.chosen(requests), smallest(ours, requests, tokens)
            full = (chosen.num_reqs, chosen.num_tokens) if chosen.cg_mode is Mode.FULL else None
            assert full == (None if step is None else (step.requests, step.rows)), (sizes, requests)


# Recognising, against the specialized decode of the wheel


class Table(NamedTuple):
    shape: tuple[int, int]


def metadata(counts: Counts, tokens: int) -> Any:
    """vLLM's metadata with these counts: of KDA where it tells verify requests apart, else of MLA."""
    said = {
        "num_prefills": counts.prefills,
        "num_decodes": counts.decodes,
        "num_decode_tokens": counts.decode_tokens,
    }
    if counts.verifies is not None:
        said["num_spec_decodes"] = counts.verifies
        said["num_spec_decode_tokens"] = counts.verify_tokens
        table = None if counts.staged is None else Table((counts.staged, tokens))
        said["spec_state_indices_tensor"] = table
    return SimpleNamespace(**said)


@functools.cache
def specialized() -> SimpleNamespace:
    """What decides in the specialized decode whether a layer takes a step."""
    module = "models/kimi_k3/nvidia/specialized_decode/runtime/decode.py"
    return taken(module, "layer_name", "decode_metadata", "is_uniform_verify")


def theirs_says(rows: int, tokens: int, layers: list[Counts]) -> int:
    """Tokens a request of the step that stock's specialized decode would take; 0 if it leaves it."""
    found = specialized()
    said = {f"layer {i}": metadata(c, tokens) for i, c in enumerate(layers)}
    context = SimpleNamespace(attn_metadata=said)
    each = tokens if any(getattr(m, "num_spec_decodes", 0) for m in said.values()) else 1
    if rows % each:
        return 0
    modules = [SimpleNamespace(prefix=name) for name in said]
    taken_all = all(found.decode_metadata(m, context, each, rows) is not None for m in modules)
    return each if taken_all else 0


def test_the_steps_that_are_taken_are_those_that_the_specialized_decode_takes() -> None:
    """Over metadata as engines make it and as they do not. Ours takes no step that stock's leaves."""
    rng = random.Random(0)
    agreed = refused = stricter = 0
    for _ in range(4000):
        tokens = rng.choice(TOKENS)
        known = prepared(range(1, 65), tokens)
        requests = rng.randint(1, MAX_ROWS // tokens)
        verify = tokens > 1 and rng.random() < 0.6
        each = tokens if verify else 1
        rows = requests * each
        live = rng.randint(1, requests)
        kda = (
            Counts(verifies=live, verify_tokens=live * tokens, staged=requests)
            if verify
            else Counts(decodes=requests, decode_tokens=requests, verifies=0)
        )
        layers = [kda, Counts(decodes=requests, decode_tokens=rows)]
        if rng.random() < 0.6:  # something is not as it should be
            at = rng.randrange(2)
            field = rng.choice(
                ("prefills", "decodes", "decode_tokens", "verifies", "verify_tokens", "staged")
            )
            changed = {**layers[at].__dict__, field: rng.choice((0, 1, 2, live, live + 1, rows))}
            if at == 1:
                changed |= {"verifies": None}
            layers[at] = Counts(**changed)
        if rng.random() < 0.1:
            rows += rng.randint(1, 3)
        theirs, ours = theirs_says(rows, tokens, layers), recognise(rows, tokens, layers, known)
        assert ours.step is None or theirs == ours.step.tokens, (rows, tokens, layers)
        if ours.step is not None:
            agreed += 1
        elif not theirs:
            refused += 1
        else:  # stock's looks at less: it takes decode rows without counting them, and more than 64
            stricter += 1
            assert rows > MAX_ROWS or "are not one token a request" in ours.reason, (ours.reason, layers)
    assert agreed > 1000 and refused > 800 and stricter < 500
