from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_model.litmus_programs import programs
from workbench import memory_model as mm
from workbench.errors import WorkbenchError

OWN = sorted((Path(__file__).parent / "litmus").glob("*.litmus"))
PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "litmus"
WHOLE = """PTX everything
"remark one" (* and a comment *)
"remark
two"
{
x=0; y = 0x10; a[3] = {1, 2, 3}; c[2]; e[2]=7;
P0:r0 = -1; 1:r1 = 5;
z @ generic aliases x; s @ surface aliases z;
m @ mbarrier 2;
grid 1 @ programmatic after 0
}
 P0@cta 0, gpu 0 | P1@cta 1,gpu 0,cluster 2,warp 3,grid 1 ;
 ld r1, 5        | L1: ld.volatile.v2 {r0, r1}, a ;
 ld x1, r1       | membar.gl ;
 ld r2, x        | bne r0, r1, L1 ;
 (* nothing *)   | ;
 st.volatile a[r1], -2 | goto L2 ;
 | L2: ;
filter (P0:r0 != 3 /\\ true)
not exists (~(x = 1 || 1:r0 >= 0x2) && a[1] == x \\/ false);
"""


@settings(max_examples=120, deadline=None)
@given(programs())
def test_what_is_printed_reads_as_the_same(test: mm.Litmus) -> None:
    text = mm.render(test)
    again = mm.parse(text)
    assert again == test
    assert again.comments == test.comments
    assert mm.render(again) == text


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.stem)
def test_own_tests_survive_printing(path: Path) -> None:
    test = mm.read(path)
    assert mm.parse(mm.render(test)) == test


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public litmus tests are not beside the project")
def test_public_tests_survive_printing() -> None:
    for path in sorted(PUBLIC.rglob("*.litmus")):
        test = mm.read(path)
        assert mm.parse(mm.render(test)) == test, path


def test_everything_that_a_header_may_hold() -> None:
    test = mm.parse(WHOLE)
    assert [(loc.name, loc.initial) for loc in test.locations[:5]] == [
        ("x", (0,)), ("y", (16,)), ("a", (1, 2, 3)), ("c", (0, 0)), ("e", (7, 7)),
    ]  # fmt: skip
    assert test.registers == ((0, "r0", 2**64 - 1), (1, "r1", 5))
    place = test.threads[1].place
    assert (place.cta, place.gpu, place.cluster, place.warp, place.grid) == (1, 0, 2, 3, 1)
    assert test.comments == ("remark one", "remark\ntwo")
    assert [i.line for i in test.threads[0].code] == [13, 14, 15, 17]
    assert mm.parse(mm.render(test)) == test


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("PTX everything", "ptx everything", 1, "begins with the line `PTX NAME`"),
        ("{\nx=0", "x=0", 5, "expected `{`"),
        ("x=0;", "x=0; x=1;", 6, "x is declared twice"),
        ("a[3]", "a[4]", 6, "a has 4 elements, 3 are given"),
        ("c[2]", "c[65]", 6, "1 to 64 elements"),
        ("c[2]", "c[0]", 6, "1 to 64 elements"),
        ("1:r1", "4:r1", 7, "there is no thread P4"),
        ("aliases z", "aliases q", 5, "s is an alias of q, which is not declared"),
        ("generic aliases x", "generic aliases z", 5, "z is an alias of itself"),
        ("surface", "surfaces", 8, "unknown proxy 'surfaces'"),
        ("mbarrier 2", "mbarrier 0", 9, "1 to 1048575 arrivals"),
        ("after 0", "after 1", 10, "a lower number"),
        ("P1@cta 1,gpu 0,", "P1@cta 1,", 12, "say the cta and the gpu of P1"),
        ("P1@", "P0@", 12, "thread P0 is there twice"),
        ("warp 3", "wrap 3", 12, "a thread's place says"),
        ("| membar.gl", "| membar.gl | fence.sc.gpu", 14, "3 columns, the first has 2"),
        ("membar.gl", "membar.gpu", 14, "unknown instruction 'membar.gpu'"),
        ("ld r1, 5", "ld r1 5", 13, "needs another operand"),
        ("ld r1, 5", "ld r1, 5 6", 13, "unexpected '6'"),
        ("ld r1, 5", "ld.acquire r1, x", 13, "needs a scope"),
        ("ld r1, 5", "ld.weak.gpu r1, x", 13, "a weak access has no scope"),
        ("ld r1, 5", "ld.weak x, x", 13, "x is a location; a register is needed"),
        ("ld r1, 5", "ld.weak r1, q", 13, "location q is not declared"),
        ("ld r1, 5", "ld.weak r1, a", 13, "say which element"),
        ("ld r1, 5", "ld.weak r1, a[3]", 13, "this reaches past them"),
        ("ld r1, 5", "ld.weak r1, x[0]", 13, "x is not an array"),
        ("ld r1, 5", "ld.weak.v2 {r1, r2, r3}, a", 13, "takes 2 values, 3 are given"),
        ("ld r1, 5", "tld.relaxed.gpu r1, x", 13, "unknown instruction"),
        ("ld r1, 5", "red.relaxed.gpu.cas x, 1, 2", 13, "unknown instruction"),
        ("ld r1, 5", "mbarrier.arrive x", 13, "x is not declared as an mbarrier"),
        ("ld r1, 5", "mbarrier.try_wait m, 0", 13, "unknown instruction"),
        ("ld r1, 5", "cp.async x, 3", 13, "expected a location, found '3'"),
        ("ld r1, 5", "beq r0, r1, L9", 13, "P0 has no label L9"),
        ("| L2: ;", "| L2: ; | L2: ;", 18, "label L2 is there twice in P1"),
        ("goto L2", "goto", 17, "expected a label"),
        ("filter (", "filter ", 19, "expected exists, ~exists or forall, found"),
        ("1:r0 >=", "1:r0 >", 20, ""),
        ("1:r0 >=", "1:r0 ~", 20, "expected a comparison"),
        ("a[1]", "a[3]", 20, "a has no element 3"),
        ("a[1]", "a", 20, "a is an array"),
        ("a[1]", "r1", 20, "a register is written P0:r1"),
        ("not exists", "not forall", 20, "expected exists, ~exists or forall"),
        ("0x2", "0x12345678901234567", 20, "expected"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in WHOLE
    text = WHOLE.replace(old, new, 1)
    if not message:
        assert mm.parse(text)
        return
    with pytest.raises(mm.LitmusError) as raised:
        mm.parse(text, "t.litmus")
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"t.litmus:{line}: ")


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(mm.LitmusError, match="nested too deeply"):
        mm.parse(WHOLE.replace("(~(x", "(" * 5000 + "(~(x"))


def _mutated(text: str, rng: random.Random) -> str:
    pieces = [
        "{",
        "}",
        ";",
        "|",
        "@",
        "[",
        "]",
        "(",
        ")",
        "~",
        "\\/",
        "/\\",
        "==",
        "\n",
        '"',
        "(*",
        "*)",
        "-",
        "0x",
    ]
    pieces += [
        "x",
        "r0",
        "P0",
        "exists",
        "99999999999999999999999",
        "\x00",
        "é",
        ".",
        ",",
        ":",
        "v4",
        "aliases",
    ]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:at] + rng.choice(pieces) + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randint(1, 6) :]
            case 2:
                other = rng.randrange(len(text) + 1)
                text = text[:at] + text[other : other + rng.randint(1, 20)] + text[at:]
            case _:
                text = text[:at] + chr(rng.randrange(1, 256)) + text[at + 1 :]
    return text


@pytest.mark.parametrize("seed", range(6))
def test_mutated_texts_give_a_test_or_a_typed_error(seed: int) -> None:
    rng = random.Random(seed)
    texts = [WHOLE, *(path.read_text() for path in OWN)]
    read = 0
    for _ in range(500):
        text = _mutated(rng.choice(texts), rng)
        try:
            test = mm.parse(text)
        except mm.LitmusError as e:
            assert e.line is not None and 1 <= e.line <= text.count("\n") + 1
            continue
        read += 1
        assert mm.parse(mm.render(test)) == test
    assert read > 20


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_a_typed_error(text: str) -> None:
    for whole in (text, "PTX t\n{" + text, "PTX t\n{x=0;}\n P0@cta 0,gpu 0;\n" + text):
        try:
            mm.parse(whole)
        except WorkbenchError:
            continue
