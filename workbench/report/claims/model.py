"""What a claim file holds: measurements with their premises, and what is claimed of them."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from workbench.errors import UnknownNameError
from workbench.report.claims.premises import Scope, Value


def _printed(value: object) -> Decimal:
    """A figure with its printed digits: text, `"1.50"`, keeps a trailing zero that a TOML number loses."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError("a figure is a number or a number in quotes")
    try:
        figure = Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError(f"{value!r} is no number") from None
    if not figure.is_finite() or figure <= 0:
        raise ValueError(f"{value!r} is not positive and finite")
    if not -12 <= figure.adjusted() <= 12 or len(figure.as_tuple().digits) > 18:
        raise ValueError(f"{str(value)[:40]!r} is no figure that anybody prints; choose another unit")
    return figure


Figure = Annotated[Decimal, BeforeValidator(_printed)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, Field(min_length=1)]


class Entry(BaseModel):
    """Base of what a claim file holds: immutable, and nothing it does not know."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Measurement(Entry):
    """A number, or the lack of one, and what it rests on."""

    name: Name
    implementation: Text
    """What was timed: framework and path, or kernel and configuration."""
    quantity: Text
    """What the number is, its statistic included: `time of one layer`, `P90 interactivity`."""
    unit: Text
    value: Figure | None = None
    """As printed; absent where only a ratio was published."""
    kind: Literal["measured", "predicted"]
    reported_by: Literal["self", "third party"]
    """`self`: by those who made the implementation."""
    source: Text
    """Where the number stands, so that a reader can look it up."""
    scope: Scope = "serving"
    premises: dict[str, Value] = {}


class Claim(Entry):
    """What is said: a ratio of two measurements, a span of such ratios, or one figure."""

    name: Name
    text: Text
    """The claim as it was made, in short."""
    of: Name | None = None
    """Measurement above the line, or the one figure that is claimed."""
    over: Name | None = None
    """Measurement below the line."""
    ratio: Figure | None = None
    """As printed; absent where the reader is left to divide."""
    varies: Name = "implementation"
    """The one thing that the ratio is about: `implementation`, or a premise."""
    alike: tuple[Name, ...] = ()
    """Premises that the source says are the same on both sides without stating them."""
    spans: tuple[Name, ...] = ()
    """Claims whose ratios lie between `low` and `high`."""
    low: Figure | None = None
    high: Figure | None = None
    note: str = ""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Claim:
        if self.spans:
            if self.of or self.over or self.ratio or self.alike:
                raise ValueError(
                    "a claim with `spans` has `low` and `high`, and no `of`, `over`, `ratio`, `alike`"
                )
            if self.low is None or self.high is None or self.low > self.high:
                raise ValueError("a claim with `spans` needs `low` and `high`, in this order")
        elif self.low is not None or self.high is not None:
            raise ValueError("`low` and `high` belong to a claim with `spans`")
        elif self.of is None:
            raise ValueError("a claim needs `of`, a measurement")
        elif self.over is None and (self.ratio is not None or self.alike):
            raise ValueError("`ratio` and `alike` want a second measurement in `over`")
        return self


class ClaimFile(Entry):
    """Measurements and claims by name."""

    title: str
    measurements: dict[str, Measurement]
    claims: dict[str, Claim]

    def measurement(self, name: str) -> Measurement:
        """The measurement of that name; raises UnknownNameError."""
        if name not in self.measurements:
            raise UnknownNameError("measurement", name, self.measurements)
        return self.measurements[name]

    def claim(self, name: str) -> Claim:
        """The claim of that name; raises UnknownNameError."""
        if name not in self.claims:
            raise UnknownNameError("claim", name, self.claims)
        return self.claims[name]
