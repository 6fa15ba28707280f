"""Judges claims: a ratio is one only between measurements that differ in nothing but what it is about."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Literal

from workbench.report.claims.model import Claim, ClaimFile, Measurement
from workbench.report.claims.premises import TERMS, Value, equal, required, told
from workbench.report.documents import Document
from workbench.verify.report import Figure


class Verdict(StrEnum):
    """What a claim comes to."""

    LIKE_FOR_LIKE = "like for like"
    """The sides differ in nothing but what the ratio is about; printed figures do not contradict it."""
    STATED = "stated"
    """One figure, no ratio, and all premises that matter are stated."""
    NOT_LIKE_FOR_LIKE = "not like for like"
    UNKNOWN = "unknown"
    """A premise that matters is not stated, so nobody can say."""
    WRONG_ARITHMETIC = "wrong arithmetic"
    """Like for like, but the printed figures do not give what is claimed."""

    @property
    def holds(self) -> bool:
        """True if the claim holds as it was made."""
        return self in (Verdict.LIKE_FOR_LIKE, Verdict.STATED)


class Difference(Document):
    """A premise that differs."""

    premise: str
    of: str
    over: str

    def __str__(self) -> str:
        return f"{self.premise}: {self.of} against {self.over}"


class Missing(Document):
    """A premise that is not stated where it must be."""

    premise: str
    side: Literal["of", "over", "both"]


class Side(Document):
    """One measurement as it enters a claim."""

    name: str
    implementation: str
    quantity: str
    value: str | None
    """As printed, with its unit; None where it was not published."""
    kind: Literal["measured", "predicted"]
    reported_by: Literal["self", "third party"]
    source: str
    premises: dict[str, Value]
    caption: tuple[str, ...]
    """All premises in words."""


class Quotient(Document):
    """A ratio with the range that the printed digits of its figures leave."""

    value: Figure
    low: Figure
    high: Figure

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g} by the printed digits)"


class Judgement(Document):
    """One claim, judged."""

    name: str
    text: str
    """The claim as it was made."""
    form: Literal["ratio", "span", "figure"]
    verdict: Verdict
    of: Side | None = None
    over: Side | None = None
    varies: str = ""
    """What the ratio is about."""
    kind: Literal["measured", "predicted", ""] = ""
    """Of both sides; empty where they differ or for a span."""
    ratio: Quotient | None = None
    """Only between measurements with equal premises."""
    arithmetic: Literal["agrees", "disagrees", "no figures", "nothing claimed"] = "nothing claimed"
    """Whether the printed figures give what is claimed, whatever the ratio is worth."""
    differs: tuple[Difference, ...] = ()
    missing: tuple[Missing, ...] = ()
    alike: tuple[str, ...] = ()
    """Premises that the source says are the same on both sides without stating them."""
    equal: tuple[str, ...] = ()
    """Premises that are the same on both sides, in words."""
    conditions: tuple[str, ...] = ()
    """What must be said with the claim."""
    parts: tuple[str, ...] = ()
    """Of a span: its claims, each with its verdict."""
    note: str = ""


class ClaimsDocument(Document):
    """`workbench report --claim FILE --json`."""

    file: str
    title: str
    claims: tuple[Judgement, ...]
    holds: bool
    """True if every claim holds as stated."""


def judge_all(source: str, file: ClaimFile, only: str | None = None) -> ClaimsDocument:
    """Judge the claims of a file, or the one named `only`.

    Raises:
        UnknownNameError: if there is no claim of that name.
    """
    chosen = file.claims.values() if only is None else [file.claim(only)]
    judged = tuple(judge(file, claim) for claim in chosen)
    holds = all(j.verdict.holds for j in judged)
    return ClaimsDocument(file=source, title=file.title, claims=judged, holds=holds)


def judge(file: ClaimFile, claim: Claim) -> Judgement:
    """Judge one claim of a file."""
    if claim.spans:
        return _span(file, claim)
    assert claim.of is not None
    of = file.measurement(claim.of)
    return _figure(claim, of) if claim.over is None else _ratio(claim, of, file.measurement(claim.over))


def _figure(claim: Claim, of: Measurement) -> Judgement:
    missing = tuple(
        Missing(premise=n, side="of") for n in required(of.scope, of.premises) if n not in of.premises
    )
    return Judgement(
        name=claim.name,
        text=claim.text,
        form="figure",
        verdict=Verdict.UNKNOWN if missing else Verdict.STATED,
        of=_side(of),
        kind=of.kind,
        missing=missing,
        conditions=_conditions(of),
        note=claim.note,
    )


def _ratio(claim: Claim, of: Measurement, over: Measurement) -> Judgement:
    differs = [
        Difference(premise=name, of=str(a), over=str(b))
        for name, a, b in (
            ("quantity", of.quantity, over.quantity),
            ("unit", of.unit, over.unit),
            ("scope", of.scope, over.scope),
            ("kind", of.kind, over.kind),
            ("reporter", of.reported_by, over.reported_by),
            ("implementation", of.implementation, over.implementation),
        )
        if name != claim.varies and not equal(a, b)
    ]
    missing, same, alike = [], {}, []
    wanted = {*required(of.scope, of.premises), *required(over.scope, over.premises)}
    for name in TERMS:
        a, b = of.premises.get(name), over.premises.get(name)
        if a is None and b is None and name not in wanted and name != claim.varies:
            continue
        if a is not None and b is not None:
            if name == claim.varies:
                continue
            if equal(a, b):
                same[name] = a
            else:
                differs.append(Difference(premise=name, of=str(a), over=str(b)))
        elif name in claim.alike:
            alike.append(name)
        else:
            lacking: Literal["of", "over", "both"] = "both" if a is b else "of" if a is None else "over"
            missing.append(Missing(premise=name, side=lacking))
    ratio = _quotient(of, over)
    arithmetic = _arithmetic(claim, ratio)
    comparable = not differs and not missing
    if differs:
        verdict = Verdict.NOT_LIKE_FOR_LIKE
    elif missing:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.WRONG_ARITHMETIC if arithmetic == "disagrees" else Verdict.LIKE_FOR_LIKE
    return Judgement(
        name=claim.name,
        text=claim.text,
        form="ratio",
        verdict=verdict,
        of=_side(of),
        over=_side(over),
        varies=claim.varies,
        kind=of.kind if of.kind == over.kind else "",
        ratio=ratio if comparable else None,
        arithmetic=arithmetic,
        differs=tuple(differs),
        missing=tuple(missing),
        alike=tuple(alike),
        equal=told(same),
        conditions=_conditions(of, over, alike=tuple(alike)),
        note=claim.note,
    )


def _span(file: ClaimFile, claim: Claim) -> Judgement:
    parts = [(n, judge(file, file.claim(n))) for n in claim.spans]
    verdicts = {p.verdict for _, p in parts}
    order = (Verdict.NOT_LIKE_FOR_LIKE, Verdict.UNKNOWN, Verdict.WRONG_ARITHMETIC)
    verdict = next((v for v in order if v in verdicts), Verdict.LIKE_FOR_LIKE)
    values = [_claimed(file, n, p) for n, p in parts]
    known = [v for v in values if v is not None]
    arithmetic: Literal["agrees", "disagrees", "no figures"] = "no figures"
    if len(known) == len(values):
        assert claim.low is not None and claim.high is not None
        ends = ((claim.low, min(known)), (claim.high, max(known)))
        agrees = all(_overlap(_range(printed), _range(value)) for printed, value in ends)
        arithmetic = "agrees" if agrees else "disagrees"
    if verdict is Verdict.LIKE_FOR_LIKE and arithmetic == "disagrees":
        verdict = Verdict.WRONG_ARITHMETIC
    kinds = {p.kind for _, p in parts}
    return Judgement(
        name=claim.name,
        text=claim.text,
        form="span",
        verdict=verdict,
        kind=kinds.pop() if len(kinds) == 1 else "",
        arithmetic=arithmetic,
        conditions=tuple(dict.fromkeys(c for _, p in parts for c in p.conditions)),
        parts=tuple(f"{n}: {p.verdict.value}" for n, p in parts),
        note=claim.note,
    )


def _claimed(file: ClaimFile, name: str, judged: Judgement) -> Decimal | None:
    """The ratio of a claim: as printed, else as it follows from its figures."""
    printed = file.claim(name).ratio
    if printed is not None:
        return printed
    return None if judged.ratio is None else Decimal(repr(judged.ratio.value))


def _side(m: Measurement) -> Side:
    return Side(
        name=m.name,
        implementation=m.implementation,
        quantity=m.quantity,
        value=None if m.value is None else f"{m.value:f} {m.unit}",
        kind=m.kind,
        reported_by=m.reported_by,
        source=m.source,
        premises=m.premises,
        caption=told(m.premises),
    )


def _conditions(*sides: Measurement, alike: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What a reader must be told, whatever the verdict."""
    found = []
    predicted = [m.name for m in sides if m.kind == "predicted"]
    if predicted:
        found.append(
            "predicted, not measured" + ("" if len(predicted) == len(sides) else f": {predicted[0]}")
        )
    if any(m.reported_by == "self" for m in sides):
        found.append("self-reported")
    if any(m.reported_by == "third party" for m in sides):
        found.append("reported by a third party")
    if any(m.premises.get("acceptance") == "synthetic" for m in sides):
        lengths = dict.fromkeys(
            str(m.premises.get("acceptance_length", "not stated"))
            for m in sides
            if m.premises.get("acceptance") == "synthetic"
        )
        found.append(f"synthetic acceptance, length {' and '.join(lengths)}: no draft model's own")
    if any(m.premises.get("prefill") == "none" for m in sides):
        found.append("no prefill beside the decode steps")
    for counted in ("counted", "not counted"):
        if any(m.premises.get("prefill") == counted for m in sides):
            found.append(f"prefill {counted}")
    shares = dict.fromkeys(str(m.premises["prefill_share"]) for m in sides if "prefill_share" in m.premises)
    if shares:
        found.append(f"prefill share {' and '.join(shares)}")
    if alike:
        found.append(f"said to be alike, not stated: {', '.join(alike)}".replace("_", " "))
    return tuple(found)


# Arithmetic on printed figures

Range = tuple[Decimal, Decimal]


def _range(printed: Decimal) -> Range:
    """What a figure may have been before it was printed: half a unit of its last digit either way."""
    exponent = printed.as_tuple().exponent
    assert isinstance(exponent, int)
    half = Decimal(1).scaleb(exponent) / 2
    return max(printed - half, Decimal(0)), printed + half


def _overlap(a: Range, b: Range) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def _quotient(of: Measurement, over: Measurement) -> Quotient | None:
    if of.value is None or over.value is None:
        return None
    (low, high), (least, most) = _range(of.value), _range(over.value)
    ceiling = float(high / least) if least else float("inf")
    return Quotient(value=float(of.value / over.value), low=float(low / most), high=ceiling)


def _arithmetic(
    claim: Claim, ratio: Quotient | None
) -> Literal["agrees", "disagrees", "no figures", "nothing claimed"]:
    if claim.ratio is None:
        return "nothing claimed"
    if ratio is None:
        return "no figures"
    low, high = _range(claim.ratio)
    return "agrees" if float(low) <= ratio.high and ratio.low <= float(high) else "disagrees"
