"""One conversation with a model, from the task to `finish`, a limit, or a failure.

Every turn is: ask the model, answer its calls, have what it submits evaluated. All candidates of a turn are
evaluated side by side. A variant that passes every check has its knobs tuned while the model thinks; what
comes of it is told after the model's next answer, so that a replay goes the same way whatever took how long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from workbench.agent.desk import Desk, Edit
from workbench.agent.feedback import name_of
from workbench.agent.model import (
    BudgetError,
    ContextOverflowError,
    Message,
    ModelError,
    Profile,
    Provider,
    Reply,
    Request,
    ToolCall,
)
from workbench.agent.prompts import fill
from workbench.agent.run import Candidate, Status
from workbench.agent.tools import Finish, Submit, answer, parse, specs
from workbench.agent.tuning import Tuner
from workbench.errors import WorkbenchError

_PATIENCE = 3
"""Turns without a call, one after another, until a conversation is ended."""
_KEPT = 4
"""Messages at the end of a conversation that are never shortened."""
_SHORTENED = "[left out to save room; ask again if you need it]"


@dataclass
class Chain:
    """One conversation.

    Args:
        number: of the conversation in its run.
        provider: answers.
        profile: which model and how.
        desk: what its calls work on.
        tuner: tries knobs of verified variants.
        opening: system prompt and task.
        stall: turns without a better candidate until the conversation is ended.
        on_turn: is told of each answer.
    """

    number: int
    provider: Provider
    profile: Profile
    desk: Desk
    tuner: Tuner
    opening: Sequence[Message]
    stall: int
    on_turn: Callable[[int, int, Reply], None] = lambda chain, turn, reply: None
    turn: int = 0
    born: int = 0
    """Turns that the run had made when this conversation began."""
    ended: str | None = None
    """Why the conversation is over; None while it goes on."""
    lessons: tuple[str, ...] = ()
    messages: list[Message] = field(init=False)
    _idle: int = 0
    _stalled: int = 0
    _pending: list[Future[Candidate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = list(self.opening)

    def say(self, text: str) -> None:
        """Tell the model something with its next turn."""
        self.messages.append(Message(role="user", content=text))

    def run(self, turns: int) -> None:
        """Go on for at most so many turns; candidates still being tuned are waited for."""
        for _ in range(turns):
            if self.ended is not None:
                break
            self._step()
        self._collect()

    def _step(self) -> None:
        before = self.desk.best()
        try:
            reply = self._ask()
        except BudgetError as e:
            self.ended = f"budget: {e}"
            return
        except ModelError as e:
            self.ended = f"model: {e}"
            return
        self.turn += 1
        self.messages.append(reply.message)
        self.on_turn(self.number, self.turn - 1, reply)
        tuned = self._collect()
        if reply.message.tool_calls:
            self._idle = 0
            self.messages += self._answers(reply)
        else:
            self._idle += 1
            if self._idle >= _PATIENCE:
                said = "refused" if reply.refusal else "called nothing"
                self.ended = f"model: it {said} {self._idle} times in a row"
            else:
                self.say(fill("nudge"))
        if tuned:
            self.say(tuned)
        after = self.desk.best()
        self._stalled = 0 if after is not before else self._stalled + 1
        if self.ended is None and self._stalled >= self.stall:
            self.ended = f"stall: {self._stalled} turns without a better candidate"

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self) -> Reply:
        room = self.profile.context_tokens - self.profile.max_output_tokens
        self._shorten(room)
        for shorter in (2, 4, None):
            try:
                return self.provider.complete(self._request(), self.number, self.turn)
            except ContextOverflowError:
                if shorter is None:
                    raise
                self._shorten(self._request().estimated_tokens // shorter)
        raise AssertionError("the last try returns or raises")

    def _request(self) -> Request:
        return Request(
            model=self.profile.model,
            messages=tuple(self.messages),
            tools=specs(),
            max_output_tokens=self.profile.max_output_tokens,
            sampling=self.profile.sampling,
        )

    def _shorten(self, tokens: int) -> None:
        """Leave out the text of old answers, the oldest first, until the conversation fits into `tokens`."""
        first = len(self.opening)
        for n in range(first, len(self.messages) - _KEPT):
            if self._request().estimated_tokens <= tokens:
                return
            m = self.messages[n]
            if m.role == "tool" and len(m.content) > len(_SHORTENED):
                self.messages[n] = m.model_copy(update={"content": _SHORTENED})
            elif m.role == "assistant" and m.tool_calls:
                calls = tuple(c.model_copy(update={"arguments": "{}"}) for c in m.tool_calls)
                self.messages[n] = m.model_copy(update={"tool_calls": calls})

    # -- answering -------------------------------------------------------------------------------

    def _answers(self, reply: Reply) -> list[Message]:
        """One message a call; what is submitted is evaluated side by side."""
        started = [self._begin(call, reply) for call in reply.message.tool_calls]
        texts = []
        for begun in started:
            if isinstance(begun, str):
                texts.append(begun)
                continue
            candidate = begun.result()
            self.desk.keep(candidate)
            texts.append(self.desk.report(candidate))
            self._pending += self.tuner.start(self.desk, candidate, self.born + self.turn)
        calls = reply.message.tool_calls
        return [
            Message(role="tool", content=text, tool_call_id=call.id)
            for call, text in zip(calls, texts, strict=True)
        ]

    def _begin(self, call: ToolCall, reply: Reply) -> str | Future[Candidate]:
        """Answer a call at once, or begin the evaluation that answers it."""
        try:
            arguments = parse(call)
            match arguments:
                case Finish():
                    return self._finish(arguments)
                case Submit():
                    edits = tuple(Edit(e.old, e.new) for e in arguments.edits)
                    now = self.born + self.turn
                    return self.desk.submit(
                        arguments.source, arguments.base, edits, arguments.knobs, arguments.idea, now
                    )
                case _:
                    return answer(self.desk, arguments)
        except WorkbenchError as e:
            cut = "; your answer was cut off at its length limit" if reply.finish == "length" else ""
            return f"error: {e}{cut}"

    def _finish(self, said: Finish) -> str:
        """End the conversation, unless its best candidate fails a check that only finalists meet."""
        self.lessons = tuple(said.lessons)
        best = self.desk.best()
        if best is not None:
            checked = self.desk.check(best)
            if checked.status not in (Status.VERIFIED, Status.LOST):
                return fill("not_yet", report=self.desk.report(checked))
        self.ended = f"finished: {' '.join(said.summary.split())[:300]}"
        return "done"

    def _collect(self) -> str:
        """Wait for the knobs that were being tuned; returns what to tell of them."""
        if not self._pending:
            return ""
        tried = [f.result() for f in self._pending]
        self._pending = []
        for candidate in tried:
            self.desk.keep(candidate)
        good = [c for c in tried if c.predicted_us is not None]
        text = f"Knobs were tuned meanwhile: {len(tried)} settings tried, {len(good)} passed every check."
        for c in sorted(good, key=lambda c: (c.predicted_us or 0.0, c.order))[:3]:
            knobs = " ".join(f"{k}={v}" for k, v in c.proposal.knobs.items())
            text += f"\n{name_of(c.proposal.index)}: {c.predicted_us:.2f} us predicted at {knobs}"
        return text
