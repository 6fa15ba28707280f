"""What a run with a model has beyond one without: spending, ends of conversations, descent of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.agent.model import Reply, Spend
    from workbench.agent.run import Candidate, RunResult


def spending(spend: Spend) -> str:
    """What the model cost, on one line."""
    used = spend.usage
    cached = f" ({used.cached:,} cached)" if used.cached else ""
    about = "about " if used.estimated else ""
    parts = [
        f"{spend.calls} {'call' if spend.calls == 1 else 'calls'}",
        f"{about}{used.prompt:,} tokens in{cached}, {used.completion:,} out",
    ]
    if spend.wasted.total:
        parts.append(f"{spend.wasted.total:,} in answers that broke off")
    if spend.lost.total:
        parts.append(f"about {spend.lost.total:,} in calls that an interruption cut off")
    parts.append("price unknown" if spend.usd is None else f"{spend.usd:.4f} USD")
    return ", ".join(parts)


def summary(result: RunResult) -> list[str]:
    """Strategy, spending and why each conversation ended, a line each; empty without a model."""
    model = result.settings.model
    if model is None or result.spend is None:
        return []
    lines = [f"{model.profile.model} ({model.strategy}): {spending(result.spend)}"]
    counts = _counts(result)
    for number, end in enumerate(result.ends):
        lines.append(f"conversation {number}: {counts.get(number, 0)} candidates, {end}")
    if result.identical:
        same = ", ".join(f"#{later} is #{first}" for later, first in sorted(result.identical.items()))
        lines.append(f"compiled to the same kernels as an earlier one: {same}")
    return lines


def _counts(result: RunResult) -> dict[int, int]:
    """Candidates of each conversation, tuned ones included."""
    from workbench.agent.feedback import CHAIN_STRIDE

    counts: dict[int, int] = {}
    for c in result.candidates:
        number = c.proposal.index // CHAIN_STRIDE
        counts[number] = counts.get(number, 0) + 1
    return counts


def origin(candidate: Candidate) -> str:
    """Where a candidate comes from and what it tries; empty for a template's."""
    p = candidate.proposal
    parts = [f"from {', '.join(f'#{i}' for i in p.parents)}"] if p.parents else []
    return "; ".join([*parts, *([p.idea] if p.idea else [])])


def answered(chain: int, turn: int, reply: Reply, spend: Spend) -> str:
    """One answer of a model, on one line."""
    calls = [c.name for c in reply.message.tool_calls]
    named = ", ".join(f"{calls.count(n)} x {n}" if calls.count(n) > 1 else n for n in dict.fromkeys(calls))
    said = named or ("refusal" if reply.refusal else "nothing called")
    price = "" if spend.usd is None else f", {spend.usd:.4f} USD"
    return f"conversation {chain}, turn {turn + 1}: {said}; {spend.usage.total:,} tokens so far{price}"
