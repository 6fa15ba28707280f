"""`python -m k3_decode.vllm`: load vLLM's plugins as vLLM does and say what became of this one.

Exit code 0 if the plugin is registered and whole, 1 if not.
"""

from __future__ import annotations

import importlib
import logging
import sys

from . import status


def main() -> int:
    """Load, look, print; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        importlib.import_module("vllm.plugins").load_general_plugins()
    except ImportError as e:
        print(f"vLLM cannot be imported: {e}")
        return 1
    found = status()
    print(found)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
