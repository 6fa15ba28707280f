"""Claims for people: a block each, the verdict first, then why, then what must be said with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from workbench.report.claims.judge import ClaimsDocument, Judgement, Side, Verdict

_STYLES = {
    Verdict.LIKE_FOR_LIKE: "green",
    Verdict.STATED: "green",
    Verdict.NOT_LIKE_FOR_LIKE: "bold red",
    Verdict.WRONG_ARITHMETIC: "bold red",
    Verdict.UNKNOWN: "yellow",
}


def print_claims(document: ClaimsDocument, console: Console) -> None:
    """Print every claim with its verdict."""
    if document.title:
        console.print(Text(document.title, style="bold"))
    for claim in document.claims:
        head = Text()
        head.append(f"{claim.verdict.value}: ", style=_STYLES[claim.verdict])
        head.append(f"{claim.text} ({claim.name})")
        console.print(head)
        for line in lines(claim):
            console.print(Text(f"  {line}"))
    console.print(Text(summary(document), style="bold"))


def summary(document: ClaimsDocument) -> str:
    """How many claims came to what."""
    counts = Counter(c.verdict for c in document.claims)
    parts = [f"{counts[v]} {v.value}" for v in Verdict if counts[v]]
    return f"{len(document.claims)} claim{'s' if len(document.claims) > 1 else ''}: {', '.join(parts)}"


def claims_markdown(document: ClaimsDocument) -> str:
    """The claims as a Markdown table, for a pull request."""
    from workbench.report.markdown import table

    rows = [(c.verdict.value, c.text, "; ".join(lines(c))) for c in document.claims]
    title = f"# {document.title}\n\n" if document.title else ""
    return f"{title}{table(('verdict', 'claim', 'because'), rows)}\n\n{summary(document)}\n"


def lines(claim: Judgement) -> Iterator[str]:
    """What is to be said about a claim, a line each."""
    if claim.of is not None:
        yield from _sides(claim, claim.of)
    if claim.parts:
        yield f"of {'; '.join(claim.parts)}"
    if claim.differs:
        yield f"differs: {'; '.join(map(str, claim.differs))}"
    if claim.missing:
        yield f"not stated: {', '.join(_missing(claim))}"
    yield from _ratio(claim)
    if claim.conditions:
        yield f"to be said with it: {'; '.join(claim.conditions)}"
    if claim.note:
        yield f"note: {claim.note}"


def _sides(claim: Judgement, of: Side) -> Iterator[str]:
    over = claim.over
    if over is None:
        yield f"{of.value or 'no figure'}, {of.quantity}, {of.kind}: {of.implementation}"
        if of.caption:
            yield f"stated: {', '.join(of.caption)}"
        return
    alike = of.quantity == over.quantity and of.kind == over.kind
    yield f"{_said(of, alike)} over {_said(over, alike)}{f': {of.quantity}, {of.kind}' if alike else ''}"
    if claim.equal:
        yield f"equal: {', '.join(claim.equal)}"


def _said(side: Side, short: bool) -> str:
    value = side.value or "figure not published"
    more = "" if short else f", {side.quantity}, {side.kind}"
    return f"{side.implementation} ({value}{more})"


def _missing(claim: Judgement) -> list[str]:
    """Premises that are not stated; of which side, where the other states them."""
    told = []
    for m in claim.missing:
        side = claim.of if m.side == "of" else claim.over
        one = claim.form == "ratio" and m.side != "both" and side is not None
        told.append(m.premise.replace("_", " ") + (f" of {side.implementation}" if one and side else ""))
    return told


def _ratio(claim: Judgement) -> Iterator[str]:
    if claim.ratio is not None:
        yield f"ratio of the {claim.kind} figures: {claim.ratio}"
    elif claim.form == "ratio" and not claim.verdict.holds:
        yield "no ratio is given: the premises are not equal, or not known to be"
    match claim.arithmetic:
        case "agrees":
            yield "arithmetic: the printed figures give what is claimed"
        case "disagrees":
            yield "arithmetic: the printed figures do not give what is claimed"
        case "no figures":
            yield "arithmetic: not checked, since the figures behind the ratio are not published"
