"""Exact PTX arithmetic on arrays of lanes. `registry` holds the contract."""

from workbench.simulator.arith.registry import (
    Form,
    Semantics,
    canonicalise_f32,
    canonicalise_f64,
    destinations,
    forms,
    lookup,
    quiet,
    sources,
)

__all__ = [
    "Form",
    "Semantics",
    "canonicalise_f32",
    "canonicalise_f64",
    "destinations",
    "forms",
    "lookup",
    "quiet",
    "sources",
]
