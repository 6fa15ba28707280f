"""A provider over a transcript: what was answered before is answered again, the same and for nothing."""

from __future__ import annotations

import time

from workbench.agent.model.budget import Ledger
from workbench.agent.model.messages import Reply, Request, Usage
from workbench.agent.model.provider import ContextOverflowError, ModelError, Provider
from workbench.agent.model.transcript import Asked, Exchange, Transcript
from workbench.errors import WorkbenchError


class ReplayError(WorkbenchError):
    """The run asks something else than the transcript has, or more."""


class RecordedProvider:
    """Answers from a transcript as far as it goes, then from a live provider, whose answers it records.

    Args:
        transcript: of the run.
        ledger: is charged for every answer, recorded ones too: a resumed run has spent what it had spent.
        live: answers what the transcript does not; None to replay offline.
    """

    def __init__(self, transcript: Transcript, ledger: Ledger, live: Provider | None) -> None:
        self.transcript, self.ledger, self._live = transcript, ledger, live
        self._known: dict[int, int] = {}

    def complete(self, request: Request, chain: int, turn: int) -> Reply:
        """Answer one request.

        Raises:
            BudgetError: if a limit is reached.
            ReplayError: if the transcript has another request here, or ends and there is no live provider.
            ModelError: if the live provider fails; what that cost is recorded.
        """
        known = self._known.get(chain, 0)
        self._known[chain] = len(request.messages) + 1
        recorded = self.transcript.find(chain, turn)
        if recorded is not None and recorded.request_hash == request.hash:
            assert recorded.reply is not None
            reply = recorded.reply
        else:
            self._raise_again(request, chain, turn)
            if recorded is not None:
                raise ReplayError(
                    f"{self.transcript.path}: chain {chain}, turn {turn} was another request: contracts, "
                    "prompts, tools or settings have changed since it was recorded; start a new run"
                )
            with self.ledger.reserve(request) as bounded:
                reply = self._asked(bounded, chain, turn, known)
        self.ledger.charge(reply)
        return reply

    def _raise_again(self, request: Request, chain: int, turn: int) -> None:
        """Fail as the recorded call did; only a conversation that was too long fails again with a live
        provider.
        """
        failed = self.transcript.find_failed(chain, turn, request.hash)
        if failed is None:
            return
        self.ledger.charge_wasted(failed.wasted)
        if failed.overflow:
            raise ContextOverflowError(failed.error)
        if self._live is None:
            raise ModelError(failed.error)

    def _asked(self, request: Request, chain: int, turn: int, known: int) -> Reply:
        if self._live is None:
            raise ReplayError(f"{self.transcript.path} ends before chain {chain}, turn {turn}")
        started = time.monotonic()

        def exchange(reply: Reply | None, error: ModelError | None = None) -> Exchange:
            return Exchange(
                chain=chain,
                turn=turn,
                request_hash=request.hash,
                new_messages=request.messages[known:],
                reply=reply,
                error=str(error) if error is not None else "",
                overflow=isinstance(error, ContextOverflowError),
                wasted=error.wasted if error is not None else Usage(),
                seconds=time.monotonic() - started,
                run_seconds=self.ledger.seconds,
            )

        self.transcript.ask(
            Asked(
                asked=Usage(prompt=request.estimated_tokens, estimated=True),
                chain=chain,
                turn=turn,
                request_hash=request.hash,
            )
        )
        try:
            reply = self._live.complete(request, chain, turn)
        except ModelError as e:
            self.transcript.add(exchange(None, e))
            self.ledger.charge_wasted(e.wasted)
            raise
        self.transcript.add(exchange(reply))
        return reply
