"""How conversations work together: one alone, islands that exchange their best, or a beam of the best.

Conversations run side by side, a thread each, and meet after a fixed number of turns. What passes between
them passes only there, in the order of their numbers, so that a run goes the same way however fast each was.
There each also learns which kernels the others have tried (`Desk.elsewhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from workbench.agent.chain import Chain
from workbench.agent.feedback import describe
from workbench.agent.prompts import fill
from workbench.agent.run import Candidate


class Strategy(StrEnum):
    """How the conversations of a run work together."""

    CHAIN = "chain"
    """One after another would be the same: each goes its own way."""
    ISLANDS = "islands"
    """Now and then the best candidate of each is shown to the next."""
    BEAM = "beam"
    """Now and then new conversations go on from the best candidates of all."""


NewChain = Callable[[int, Candidate | None], Chain]
"""Makes the conversation of a number, from the task alone or to improve on a candidate."""


def run_chains(
    strategy: Strategy, new_chain: NewChain, count: int, rounds: int, every: int
) -> tuple[Chain, ...]:
    """Run all conversations of a run to their ends; returns them in the order of their numbers.

    Args:
        strategy: how they work together.
        new_chain: makes one.
        count: how many run side by side.
        rounds: turns of each; of a beam, turns from the first conversation to the last.
        every: turns between two exchanges.
    """
    chains = [new_chain(n, None) for n in range(count)]
    if strategy is Strategy.CHAIN:
        _together(chains, rounds)
        return _closed(chains, rounds)
    done = 0
    running, all_chains = chains, list(chains)
    while done < rounds:
        turns = min(every, rounds - done)
        _together(running, turns)
        done += turns
        _tell(all_chains)
        if done >= rounds:
            break
        if strategy is Strategy.ISLANDS:
            if all(c.ended is not None for c in running):
                break
            _migrate(running)
            continue
        if any(c.ended is not None and c.ended.startswith(("budget", "model")) for c in running):
            break
        best = _best(all_chains, count)
        if not best:
            if all(c.ended is not None for c in running):
                break
            continue
        for chain in running:
            chain.ended = chain.ended or "beam: others go on from the best"
        running = [new_chain(len(all_chains) + n, c) for n, c in enumerate(best)]
        all_chains += running
        for chain in running:
            chain.born = done
        _tell(all_chains)
    return _closed(all_chains, rounds)


def _together(chains: Sequence[Chain], turns: int) -> None:
    if len(chains) == 1:
        chains[0].run(turns)
        return
    with ThreadPoolExecutor(len(chains), thread_name_prefix="chain") as threads:
        for future in [threads.submit(c.run, turns) for c in chains]:
            future.result()


def _closed(chains: Sequence[Chain], rounds: int) -> tuple[Chain, ...]:
    for chain in chains:
        chain.ended = chain.ended or f"rounds: all {rounds} used"
    return tuple(chains)


def _tell(chains: Sequence[Chain]) -> None:
    """Tell each conversation what all have compiled to, so that it hears of it when it does so again."""
    first: dict[str, Candidate] = {}
    for c in sorted((c for chain in chains for c in chain.desk.candidates.values()), key=lambda c: c.order):
        if c.object_hash:
            first.setdefault(c.object_hash, c)
    for chain in chains:
        chain.desk.elsewhere = first


def _migrate(chains: Sequence[Chain]) -> None:
    """Show each conversation's best to the next one, where it is better than that one's own."""
    best = [c.desk.best() for c in chains]
    for n, chain in enumerate(chains):
        guest, own = best[n - 1], best[n]
        if guest is None or chain.ended is not None or len(chains) < 2 or not guest.proposal.source:
            continue
        if own is not None and (own.predicted_us or 0.0) <= (guest.predicted_us or 0.0):
            continue
        if guest.proposal.index in chain.desk.candidates:
            continue
        chain.desk.keep(guest)
        report = describe(guest, chain.desk.roofline_us)
        chain.say(fill("migrant", report=report, source=guest.proposal.source))


def _best(chains: Sequence[Chain], count: int) -> list[Candidate]:
    """The best candidates of all conversations, one a source."""
    found: dict[str, Candidate] = {}
    candidates = {i: c for chain in chains for i, c in chain.desk.candidates.items()}
    good = [c for c in candidates.values() if c.predicted_us is not None and c.proposal.source]
    for c in sorted(good, key=lambda c: (c.predicted_us or 0.0, c.order)):
        found.setdefault(c.source_hash, c)
    return list(found.values())[:count]
