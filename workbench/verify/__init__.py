"""Verification: numerics, ordering, memory and determinism of a compiled kernel, joined in a report."""
