"""The PTX memory model as an executable checker: litmus tests, their executions, outcomes and races.

`parse` and `read` give a test; `decide`, `executions`, `outcomes`, `allows` and `races` say what the model
makes of it; `check_files` runs many and compares them with expected verdicts. docs/memory-model.md describes
the dialect, the axioms and which rules are ours.
"""

from workbench.memory_model.explore import (
    Access,
    Decision,
    Execution,
    Outcome,
    Race,
    allows,
    decide,
    executions,
    outcomes,
    races,
)
from workbench.memory_model.printer import render
from workbench.memory_model.program import Litmus
from workbench.memory_model.reader import parse, read
from workbench.memory_model.runs import UndecidedError
from workbench.memory_model.suite import LitmusDocument, LitmusResult, check_files
from workbench.memory_model.text import LitmusError

__all__ = [
    "Access",
    "Decision",
    "Execution",
    "Litmus",
    "LitmusDocument",
    "LitmusError",
    "LitmusResult",
    "Outcome",
    "Race",
    "UndecidedError",
    "allows",
    "check_files",
    "decide",
    "executions",
    "outcomes",
    "parse",
    "races",
    "read",
    "render",
]
