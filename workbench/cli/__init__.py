"""Command line entry point."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from workbench.cli.app import run

    run()
