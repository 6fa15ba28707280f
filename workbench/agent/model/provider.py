"""What answers requests, and how it fails."""

from __future__ import annotations

from typing import Protocol

from workbench.agent.model.messages import Reply, Request, Usage
from workbench.errors import WorkbenchError


class ModelError(WorkbenchError):
    """The model cannot be asked; one line says why and what to do. `wasted` may have been charged for."""

    def __init__(self, message: str, wasted: Usage | None = None) -> None:
        self.wasted = wasted or Usage()
        super().__init__(message)


class ContextOverflowError(ModelError):
    """The conversation does not fit into the model's context."""


class Provider(Protocol):
    """Answers requests; one provider serves all chains of a run, from several threads."""

    def complete(self, request: Request, chain: int, turn: int) -> Reply:
        """Answer one request.

        Args:
            request: the whole conversation.
            chain: which of the run's conversations it is.
            turn: position of the call in its chain, from 0.

        Raises:
            ContextOverflowError: if the conversation is too long.
            ModelError: if there is no answer to be had.
        """
        ...
