"""The premises of a number: what may be named, which must be, and when two are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Value = bool | int | float | str
Scope = Literal["serving", "kernel"]
"""What was timed: a model being served, or the launches of one op."""
Premises = Mapping[str, Value]


@dataclass(frozen=True)
class Term:
    """One premise that may be named."""

    name: str
    doc: str
    required: tuple[Scope, ...] = ()
    """Scopes in which a comparison cannot be judged without it."""


TERMS: Mapping[str, Term] = {
    term.name: term
    for term in (
        Term("hardware", "GPU and system, `GB300 NVL72`", ("serving", "kernel")),
        Term("cards", "number of GPUs that served the load", ("serving",)),
        Term("parallelism", "`TP8`, `TP16`", ("serving",)),
        Term("context_parallelism", "ranks over which the cache is split"),
        Term("batch", "requests in flight at a time", ("serving",)),
        Term("load", "`fixed lengths`, or the name of a trace"),
        Term("input_tokens", "prompt tokens a request: the context at the first output token", ("serving",)),
        Term("output_tokens", "generated tokens a request"),
        Term("prefill", "`none`, `not counted` or `counted` in the figure", ("serving",)),
        Term("prefill_share", "share of the measured time spent in prefill, 0 to 1"),
        Term("speculation", "`on`, `off`, or the method"),
        Term("draft_tokens", "draft tokens a step; 0 without speculation", ("serving",)),
        Term("acceptance", "`observed`, or `synthetic` where a chosen number of drafts is accepted"),
        Term("acceptance_length", "tokens a step that are accepted, the sampled one included"),
        Term("op", "op of the workbench or name of the kernel", ("kernel",)),
        Term("workload", "named sizes, `tp8_b1`", ("kernel",)),
        Term("axes", "the sizes, `B=1 N=7168`"),
        Term("arch", "target of the cubin", ("kernel",)),
        Term("toolchain", "compiler versions and flags"),
        Term("dtype", "of weights, activations or cache"),
        Term("inputs", "generator and seed of the data"),
        Term("protocol", "how it was timed, or which model predicted it", ("kernel",)),
        Term("driver", "CUDA version of the driver"),
        Term("software", "framework and version"),
    )
}
"""Every premise by name, in the order in which they are told."""


def required(scope: Scope, premises: Premises) -> tuple[str, ...]:
    """Premises without which a figure cannot be compared, in order.

    With speculation, or where it is not known whether there was any, the kind of acceptance belongs to them;
    with synthetic acceptance its length does.
    """
    names = {name for name, term in TERMS.items() if scope in term.required}
    if premises.get("speculation") == "off":
        names.discard("draft_tokens")
    elif scope == "serving" and premises.get("draft_tokens") != 0:
        names.add("acceptance")
        if premises.get("acceptance") == "synthetic":
            names.add("acceptance_length")
    return tuple(name for name in TERMS if name in names)


def equal(a: Value, b: Value) -> bool:
    """True if two values say the same; text without regard to case and spaces."""
    if isinstance(a, str) and isinstance(b, str):
        return "".join(a.split()).casefold() == "".join(b.split()).casefold()
    return isinstance(a, str) == isinstance(b, str) and a == b


def problem(name: str, value: Value) -> str:
    """Why a value cannot be that of a premise; empty if it can."""
    choices: Mapping[str, tuple[str, ...]] = {
        "acceptance": ("observed", "synthetic"),
        "prefill": ("none", "not counted", "counted"),
    }
    if name in choices and value not in choices[name]:
        return f"{name} is one of {', '.join(choices[name])}, not {value!r}"
    counted = ("cards", "batch", "input_tokens", "output_tokens", "draft_tokens")
    least = 0 if name == "draft_tokens" else 1
    if name in counted and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        return f"{name} is a whole number from {least}, not {value!r}"
    if name == "prefill_share" and not (_is_number(value) and 0 <= float(value) <= 1):
        return f"prefill_share lies between 0 and 1, not at {value!r}"
    if name == "acceptance_length" and not (_is_number(value) and float(value) >= 1):
        return f"acceptance_length is a number from 1, not {value!r}"
    if isinstance(value, str) and not value.strip():
        return f"{name} is empty; leave it out where it is not known"
    return ""


def contradiction(premises: Premises) -> str:
    """Why premises cannot hold together; empty if they can."""
    drafts, acceptance = premises.get("draft_tokens"), premises.get("acceptance")
    if premises.get("speculation") == "off":
        drafts = 0 if drafts is None else drafts
        if drafts != 0:
            return f"speculation is off and there are {drafts} draft tokens"
    if drafts == 0 and premises.get("speculation", "off") != "off":
        return f"speculation is {premises['speculation']} and there are no draft tokens"
    if drafts == 0 and (acceptance is not None or "acceptance_length" in premises):
        return "without draft tokens there is no acceptance"
    length = premises.get("acceptance_length")
    if isinstance(drafts, int) and isinstance(length, int | float) and length > drafts + 1:
        return f"{drafts} draft tokens cannot give an acceptance length of {length}"
    if premises.get("prefill") == "none" and premises.get("prefill_share", 0) != 0:
        return "prefill is none and has a share"
    return ""


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# In words


def told(premises: Premises) -> tuple[str, ...]:
    """The premises in words, in order, as a table's caption would have them."""
    stated = [name for name in TERMS if name in premises and name != "acceptance_length"]
    if "acceptance_length" in premises and "acceptance" not in premises:
        stated.append("acceptance_length")
    words = [_acceptance(premises) if n == "acceptance" else _phrase(n, premises[n]) for n in stated]
    return tuple(words)


def _acceptance(premises: Premises) -> str:
    length = premises.get("acceptance_length")
    return f"{premises['acceptance']} acceptance" + (f", length {length}" if length is not None else "")


def _phrase(name: str, value: Value) -> str:
    match name:
        case "cards":
            return f"{value} card{'' if value == 1 else 's'}"
        case "draft_tokens":
            return "no speculation" if value == 0 else f"{value} draft token{'' if value == 1 else 's'}"
        case "input_tokens" | "output_tokens":
            kind = name.partition("_")[0]
            return f"{value} {kind} token{'' if value == 1 else 's'}"
        case "prefill":
            return "no prefill" if value == "none" else f"prefill {value}"
        case "hardware" | "parallelism" | "software":
            return str(value)
        case _:
            return f"{name.replace('_', ' ')} {value}"
