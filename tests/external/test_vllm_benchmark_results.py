"""The names that are read from results of `vllm bench serve` are those that it writes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from workbench.report.claims.serving import _RATES, ServeResult


def test_every_name_that_is_read_is_written() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "benchmarks" / "serve.py").read_text())
    written = {
        key.value
        for node in ast.walk(tree)
        for key in (
            node.keys
            if isinstance(node, ast.Dict)
            else [node.slice]
            if isinstance(node, ast.Subscript)
            else []
        )
        if isinstance(key, ast.Constant)
    }
    assert {*_RATES, *ServeResult.model_fields} <= written
    formats = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    texts = [
        "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts) for parts in formats
    ]
    assert {"mean_*_ms", "median_*_ms", "p*_*_ms"} <= set(texts)
    metrics = {"ttft", "tpot", "itl", "e2el"}
    assert metrics <= {
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
