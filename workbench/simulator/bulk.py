"""Bulk copies."""
NAMES: dict[str, object] = {}
