"""Every instruction form that the registry knows, against an independent oracle on at least 100,000 operands
each."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import oracle_approximate
import oracle_forms
import pytest
from oracle_operands import PACKED, N, codes

from workbench.simulator.arith import registry

GROUPS = defaultdict(list)
for _form in registry.forms():
    _opcode, _flags, _types = oracle_forms.parse(_form.text)
    GROUPS[".".join((_opcode, *_types[-1:]))].append(_form)

NAN_FREE = 0x7FFFFFFF


def compare_codes(got, want, form, result_type):
    """Return the lanes that differ; where the ISA leaves NaN bits open, any NaN equals any NaN."""
    different = got != want
    if form.semantics.canonical or result_type in ("pred",) or not different.any():
        return different
    base, parts = result_type, 1
    if result_type in PACKED:
        base, parts = PACKED[result_type][0], 2
    if not oracle_forms.is_float(base):
        return different
    width = oracle_forms.FMT[base].width
    unsigned = np.dtype(f"uint{width}")
    different = np.zeros(got.shape, bool)
    for i in range(parts):
        g, w = ((x >> x.dtype.type(i * width)).astype(unsigned) for x in (got, want))
        different |= (g != w) & ~(oracle_forms.is_nan(g, base) & oracle_forms.is_nan(w, base))
    return different


def as_codes(array, dtype):
    if dtype == "bool":
        return array
    return np.ascontiguousarray(array).view(f"uint{8 * np.dtype(dtype).itemsize}")


def run(form, semantics, operands):
    arrays = []
    for code, dtype in zip(operands, semantics.operands, strict=True):
        array = code[None, :].view(dtype)
        array.flags.writeable = False
        arrays.append(array)
    with registry.quiet():
        results = semantics.function(*arrays)
    results = results if isinstance(results, tuple) else (results,)
    out = []
    for r, dtype in zip(results, semantics.results, strict=True):
        assert r.dtype == np.dtype(dtype), form.text
        out.append(as_codes(np.broadcast_to(r, (1, len(operands[0])))[0], dtype))
    return out


def operands_of(form, semantics):
    types = form.operand_types[: len(semantics.operands)]
    assert len(types) == len(semantics.operands)
    operands = list(codes(types))
    if form.text.startswith("fns"):
        operands[1] = operands[1] & np.uint32(31)  # larger bases are undefined
        operands[2] = np.where(operands[0] & np.uint32(1), operands[2], operands[2] % np.uint32(40))
    return tuple(operands)


def report(form, operands, got, want, bad, extra=""):
    lanes = np.nonzero(bad)[0][:3]
    examples = "; ".join(
        f"{[hex(int(o[i])) for o in operands]} -> {int(got[i]):#x}, not {int(want[i]):#x}" for i in lanes
    )
    return f"{form.text}{extra}: {int(bad.sum())} of {len(bad)}: {examples}"


def check_exact(form):
    failures = []
    if form.immediate_required:
        cases = [(form.specialise(table), table) for table in range(256)]
    else:
        cases = [(form.semantics, None)]
        if form.specialise is not None:
            rng = np.random.default_rng(3)
            constants = [
                0x5410,
                0x7632,
                0x3210,
                0x0123,
                0x4321,
                0xFFFF,
                0x8888,
                *rng.integers(0, 1 << 16, 60).tolist(),
            ]
            cases += [(form.specialise(constant), constant) for constant in constants]
    for semantics, immediate in cases:
        operands = operands_of(form, semantics)
        if immediate is not None:  # many constants share the lanes
            operands = tuple(o[: N // 60] for o in operands)
        want = oracle_forms.expected(form, operands, immediate)
        got = run(form, semantics, operands)
        assert len(got) == len(want), form.text
        for g, w, t in zip(got, want, form.result_types, strict=True):
            bad = compare_codes(g, w, form, t)
            if bad.any():
                failures.append(report(form, operands, g, w, bad, f" [{immediate}]" if immediate else ""))
    return failures


def check_approximate(form):
    opcode, flags, types = oracle_forms.parse(form.text)
    operands = operands_of(form, form.semantics)
    (got,) = run(form, form.semantics, operands)
    t = types[0]
    if t in PACKED:
        base, bits = PACKED[t]
        lanes = [[(o >> o.dtype.type(s)).astype(f"uint{bits}") for o in (*operands, got)] for s in (0, bits)]
    else:
        base, lanes = t, [[*operands, got]]
    failures = []
    for part in lanes:
        with registry.quiet():
            ok = oracle_approximate.allowed(opcode, flags, base, part[:-1], part[-1])
        if not ok.all():
            failures.append(report(form, part[:-1], part[-1], part[-1], ~ok, " (out of bounds)"))
    return failures


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_agrees_with_oracle(group):
    failures = []
    for form in GROUPS[group]:
        failures += check_exact(form) if form.semantics.exact else check_approximate(form)
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:12])


def test_at_least_100000_operands():
    assert N >= 100_000
    assert all(len(o) >= 100_000 for f in registry.forms()[:50] for o in operands_of(f, f.semantics))
