"""Device printf: formats strings and arguments found in simulated memory."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import LOCAL_BASE, LOCAL_WINDOW
from workbench.simulator.memory import BASE

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

_SPEC = re.compile(r"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|L|j|z|t)?([diouxXeEfFgGaAcspn%])")


def _text(ck: Chunk, address: int) -> str:
    data = ck.launch.memory.bytes
    start = address - BASE
    if not 0 <= start < len(data):
        return "(bad string)"
    raw = data[start : start + 4096].tobytes()
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def render(
    ck: Chunk, form: npt.NDArray[Any], arguments: npt.NDArray[Any], co: Cohort, limit: int
) -> list[str]:
    """Return the text that each lane prints, at most `limit` pieces.

    Arguments lie in local memory, each at its natural alignment, with C's promotions (ints 4 or 8 bytes,
    doubles 8).
    """
    forms = np.broadcast_to(form, co.shape)
    places = np.broadcast_to(arguments, co.shape)
    banks = np.broadcast_to(co.local_rows(ck.space_local.stride), co.shape)
    data = ck.space_local.data[1]
    out: list[str] = []
    for r in range(co.shape[0]):
        for c in range(co.shape[1]):
            if len(out) >= limit:
                return out
            place = int(places[r, c])
            if place >= LOCAL_WINDOW:
                place -= LOCAL_WINDOW
            start = int(banks[r, c]) + place - LOCAL_BASE
            raw = data[start : int(banks[r, c]) + ck.space_local.size].tobytes() if place else b""
            out.append(_format(ck, _text(ck, int(forms[r, c])), raw))
    return out


def _format(ck: Chunk, form: str, raw: bytes) -> str:
    at = 0

    def take(size: int, kind: str) -> Any:
        nonlocal at
        at = -(-at // size) * size
        piece = raw[at : at + size].ljust(size, b"\0")
        at += size
        return struct.unpack("<" + kind, piece)[0]

    def replace(match: re.Match[str]) -> str:
        flags, width, precision, length, letter = match.groups()
        if letter == "%":
            return "%"
        width = str(take(4, "i")) if width == "*" else width
        precision = str(take(4, "i")) if precision == "*" else precision
        spec = "%" + flags + width + (f".{precision}" if precision is not None else "")
        long = length in ("ll", "l", "j", "z", "t")
        text: str
        if letter in "di":
            text = (spec + "d") % take(8 if long else 4, "q" if long else "i")
            return text
        if letter in "uoxX":
            text = (spec + ("d" if letter == "u" else letter)) % take(8 if long else 4, "Q" if long else "I")
            return text
        if letter in "eEfFgG":
            text = (spec + letter) % take(8, "d")
            return text
        if letter in "aA":
            return float(take(8, "d")).hex()
        if letter == "c":
            return chr(take(4, "i") & 0xFF)
        if letter == "s":
            return f"{_text(ck, take(8, 'Q')):>{width or 0}}"
        if letter == "p":
            return f"{take(8, 'Q'):#x}"
        return ""

    return _SPEC.sub(replace, form)
