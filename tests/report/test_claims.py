from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ContentError, WorkbenchError
from workbench.report.claims import (
    BUILT_IN,
    ClaimFile,
    Judgement,
    Verdict,
    find,
    judge,
    judge_all,
    load_claims,
)
from workbench.report.claims.judge import _range
from workbench.report.claims.premises import TERMS, contradiction, problem, required, told
from workbench.report.claims.render import lines

LIKE, NOT, UNKNOWN = Verdict.LIKE_FOR_LIKE, Verdict.NOT_LIKE_FOR_LIKE, Verdict.UNKNOWN


# The published table


@pytest.fixture(scope="module")
def published() -> ClaimFile:
    return load_claims(BUILT_IN["k3-published"])


def judged(file: ClaimFile, name: str) -> Judgement:
    return judge(file, file.claim(name))


@pytest.mark.parametrize(
    ("name", "verdict", "arithmetic", "said"),
    [
        ("layer-time", UNKNOWN, "nothing claimed", "not stated: cards, parallelism, batch"),
        ("layer-kernels", UNKNOWN, "nothing claimed", "not stated: cards, parallelism, batch"),
        ("tp8-b1", LIKE, "no figures", "GB300, 8 cards, TP8, batch 1, no speculation"),
        ("tp8-b64", LIKE, "no figures", "GB300, 8 cards, TP8, batch 64, no speculation"),
        ("tp16-b1", LIKE, "no figures", "GB300, 16 cards, TP16, batch 1, no speculation"),
        ("tp16-b64", LIKE, "no figures", "GB300, 16 cards, TP16, batch 64, no speculation"),
        ("clean-range", LIKE, "agrees", "tp8-b64: like for like"),
        (
            "tp16-synthetic",
            LIKE,
            "agrees",
            "synthetic acceptance, length 6: no draft model's own; no prefill",
        ),
        ("tp16-mixed", UNKNOWN, "nothing claimed", "synthetic acceptance, length 3.78"),
        ("agents", NOT, "agrees", "differs: cards: 16 against 8"),
        ("third-party", UNKNOWN, "no figures", "reported by a third party"),
        ("long-b1", UNKNOWN, "no figures", "prefill not counted"),
        ("long-b1-prefill", UNKNOWN, "no figures", "prefill counted"),
        ("long-b2", UNKNOWN, "no figures", "not stated: draft tokens, acceptance"),
        ("long-b2-prefill", UNKNOWN, "no figures", "not stated: draft tokens, acceptance"),
        ("tpot", UNKNOWN, "nothing claimed", "not stated: input tokens, prefill, draft tokens, acceptance"),
    ],
)
def test_each_published_figure(
    published: ClaimFile, name: str, verdict: Verdict, arithmetic: str, said: str
) -> None:
    found = judged(published, name)
    assert (found.verdict, found.arithmetic) == (verdict, arithmetic)
    assert said in "\n".join(lines(found))


def test_the_table_is_whole(published: ClaimFile) -> None:
    document = judge_all("k3-published", published)
    assert len(document.claims) == len(published.claims) == 16 and not document.holds
    text = "\n".join(f"{c.text} {' '.join(lines(c))}" for c in document.claims)
    figures = (
        "130 us", "69 us", "23 kernels", "13 kernels", "1.3 to 1.9", "1.58", "1.31", "1.88", "1.62", "842",
        "488", "1.73", "483", "3.78", "403.2", "223.7", "1.8 times", "423", "1.68", "1.50", "1.32", "1.49",
        "1.16", "8.469",
    )  # fmt: skip
    assert [f for f in figures if f not in text] == []
    used = {m for c in published.claims.values() for m in (c.of, c.over) if m}
    assert used == set(published.measurements)


def test_a_ratio_is_given_only_where_premises_are_equal(published: ClaimFile) -> None:
    given = {c.name: c.ratio for c in judge_all("", published).claims if c.ratio is not None}
    assert list(given) == ["tp16-synthetic"]
    ratio = given["tp16-synthetic"]
    assert ratio.low < ratio.value == 842 / 488 < ratio.high and f"{ratio.low:.4f}" == f"{841.5 / 488.5:.4f}"
    for name in ("agents", "layer-time", "third-party"):
        told_ratio = [s for s in lines(judged(published, name)) if "1.80" in s or "1.88" in s]
        assert told_ratio == [], name
        assert any(s.startswith("no ratio is given") for s in lines(judged(published, name)))


def test_figures_that_were_published_side_by_side_are_not_comparable(published: ClaimFile) -> None:
    claim = published.claim("tp16-synthetic")
    other = claim.model_copy(update={"over": "tp16-mixed-specialized", "varies": "load", "ratio": None})
    found = judge(published, other)
    assert found.verdict is NOT
    assert {d.premise for d in found.differs} == {"acceptance_length"}
    other = claim.model_copy(update={"of": "long-b1-specialized", "over": "long-b1-prefill-specialized"})
    assert "prefill: not counted against counted" in map(str, judge(published, other).differs)


# Judging, premise by premise


HEAD = 'format = 1\ntitle = "t"\n'
SERVING: dict[str, Any] = {
    "hardware": "H200",
    "cards": 8,
    "parallelism": "TP8",
    "batch": 4,
    "input_tokens": 512,
    "prefill": "none",
    "draft_tokens": 3,
    "acceptance": "observed",
    "acceptance_length": 2.5,
}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def table(kind: str, entry: dict[str, Any]) -> str:
    return f"[[{kind}]]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in entry.items())


def measurement(name: str, **changed: Any) -> dict[str, Any]:
    entry = {
        "name": name,
        "implementation": name,
        "quantity": "decode speed",
        "unit": "tokens/s",
        "value": "100",
        "kind": "measured",
        "reported_by": "self",
        "source": "bench.json",
        "premises": SERVING,
    } | changed
    return {k: v for k, v in entry.items() if v is not None}


def written(path: Path, first: dict[str, Any], second: dict[str, Any], **claim: Any) -> Path:
    said = {
        "name": "c",
        "text": "faster",
        "of": "new",
        "over": "old",
    } | claim
    path.write_text(HEAD + table("measurement", first) + table("measurement", second) + table("claim", said))
    return path


def verdict(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], **claim: Any) -> Judgement:
    file = load_claims(written(tmp_path / "c.toml", first, second, **claim))
    return judge(file, file.claim("c"))


CHANGED: dict[str, Any] = {
    "hardware": "GB300",
    "cards": 16,
    "parallelism": "TP16",
    "context_parallelism": 8,
    "batch": 5,
    "load": "chat",
    "input_tokens": 513,
    "output_tokens": 7,
    "prefill": "counted",
    "prefill_share": 0.5,
    "speculation": "EAGLE",
    "draft_tokens": 4,
    "acceptance": "synthetic",
    "acceptance_length": 2.51,
    "op": "moe",
    "workload": "tp8_b1",
    "axes": "B=1",
    "arch": "sm_90a",
    "toolchain": "13.2",
    "dtype": "fp8",
    "inputs": "ordinary",
    "protocol": "graph",
    "driver": "13.0",
    "software": "vLLM 0.34",
}
BASE = {
    **SERVING, "context_parallelism": 1, "load": "fixed lengths", "output_tokens": 8,
    "prefill": "not counted", "prefill_share": 0.25, "speculation": "DSpark", "op": "kda",
    "workload": "tp8_b2", "axes": "B=2", "arch": "sm_103a", "toolchain": "13.1", "dtype": "bf16",
    "inputs": "zeros", "protocol": "events", "driver": "12.9", "software": "vLLM 0.33",
}  # fmt: skip


def test_every_premise_is_tried() -> None:
    assert list(CHANGED) == list(TERMS) and sorted(BASE) == sorted(TERMS)


@pytest.mark.parametrize("name", CHANGED)
def test_a_premise_that_differs_or_is_stated_on_one_side_alone(tmp_path: Path, name: str) -> None:
    old = measurement("old", premises=BASE)
    found = verdict(tmp_path, measurement("new", value="150", premises=BASE | {name: CHANGED[name]}), old)
    assert found.verdict is NOT and found.ratio is None
    assert [d.premise for d in found.differs] == [name]
    rest = {k: v for k, v in BASE.items() if k != name}
    found = verdict(tmp_path, measurement("new", value="150", premises=rest), old)
    assert found.verdict is UNKNOWN and found.ratio is None
    assert [(m.premise, m.side) for m in found.missing] == [(name, "of")]
    same = measurement("new", value="150", premises=BASE)
    found = verdict(tmp_path, same, old)
    assert found.verdict is LIKE and found.ratio is not None and found.ratio.value == 1.5
    changed = measurement("new", value="150", implementation="old", premises=BASE | {name: CHANGED[name]})
    assert verdict(tmp_path, changed, old, varies=name).verdict is LIKE, "a ratio may be about a premise"


@pytest.mark.parametrize("name", [n for n in SERVING if n != "acceptance_length"])
def test_a_required_premise_that_neither_side_states(tmp_path: Path, name: str) -> None:
    rest = {k: v for k, v in SERVING.items() if k != name}
    sides = measurement("new", premises=rest), measurement("old", premises=rest)
    found = verdict(tmp_path, *sides)
    assert found.verdict is UNKNOWN
    assert [(m.premise, m.side) for m in found.missing] == [(name, "both")]
    found = verdict(tmp_path, *sides, alike=[name])
    assert found.verdict is LIKE and found.alike == (name,)
    assert f"said to be alike, not stated: {name.replace('_', ' ')}" in found.conditions


@pytest.mark.parametrize(
    ("field", "value", "premise"),
    [
        ("quantity", "P90 decode speed", "quantity"),
        ("unit", "tokens/s/GPU", "unit"),
        ("kind", "predicted", "kind"),
        ("reported_by", "third party", "reporter"),
        ("scope", "kernel", "scope"),
    ],
)
def test_numbers_of_different_kinds_are_not_divided(
    tmp_path: Path, field: str, value: str, premise: str
) -> None:
    found = verdict(tmp_path, measurement("new", **{field: value}), measurement("old"))
    assert found.verdict is NOT and found.ratio is None
    assert premise in {d.premise for d in found.differs}


def test_what_a_ratio_is_about_must_be_stated(tmp_path: Path) -> None:
    rest = {k: v for k, v in SERVING.items() if k != "cards"}
    stated = measurement("new", implementation="same", premises=SERVING | {"load": "a"})
    for name, lacking in (("load", SERVING), ("cards", rest)):
        found = verdict(
            tmp_path, stated, measurement("old", implementation="same", premises=lacking), varies=name
        )
        assert (name, "over") in [(m.premise, m.side) for m in found.missing] and found.verdict is UNKNOWN
    sides = [measurement(n, implementation="same", premises=rest) for n in ("new", "old")]
    for name in ("cards", "load"):
        found = verdict(tmp_path, *sides, varies=name)
        assert (name, "both") in [(m.premise, m.side) for m in found.missing]


def test_predicted_figures_are_called_predicted(tmp_path: Path) -> None:
    both = verdict(tmp_path, measurement("new", kind="predicted"), measurement("old", kind="predicted"))
    assert both.verdict is LIKE and both.kind == "predicted"
    assert "predicted, not measured" in both.conditions
    assert "ratio of the predicted figures: 1 (" in "\n".join(lines(both))
    one = verdict(tmp_path, measurement("new", kind="predicted"), measurement("old"))
    assert "kind: predicted against measured" in map(str, one.differs)
    assert "predicted, not measured: new" in one.conditions and one.kind == ""


def test_text_is_compared_without_case_and_spaces_and_numbers_as_numbers(tmp_path: Path) -> None:
    new = measurement("new", premises=SERVING | {"parallelism": "tp 8", "acceptance_length": 2.50})
    assert verdict(tmp_path, new, measurement("old")).verdict is LIKE
    new = measurement("new", premises=SERVING | {"context_parallelism": "8"})
    old = measurement("old", premises=SERVING | {"context_parallelism": 8})
    assert verdict(tmp_path, new, old).verdict is NOT


def test_without_speculation_nothing_is_asked_about_acceptance(tmp_path: Path) -> None:
    plain = {k: v for k, v in SERVING.items() if not k.startswith(("acc", "draft"))}
    for said in ({"draft_tokens": 0}, {"speculation": "off"}):
        sides = [measurement(n, premises=plain | said) for n in ("new", "old")]
        assert verdict(tmp_path, *sides).verdict is LIKE
    assert "acceptance_length" in required("serving", {"acceptance": "synthetic"})
    assert "acceptance_length" not in required("serving", {"acceptance": "observed"})


# Arithmetic


@pytest.mark.parametrize(
    ("of", "over", "ratio", "arithmetic"),
    [
        ("842", "488", "1.73", "agrees"),
        ("842", "488", "1.72", "agrees"),
        ("842.0", "488.0", "1.72", "disagrees"),
        ("842", "488", "1.7", "agrees"),
        ("842", "488", "1.74", "disagrees"),
        ("403.2", "223.7", "1.8", "agrees"),
        ("403.2", "223.7", "1.80", "agrees"),
        ("403.2", "223.7", "1.81", "disagrees"),
        ("130", "69", "1.88", "agrees"),
        ("150", "100", "1.50", "agrees"),
        ("150.0", "100.0", "1.51", "disagrees"),
        ("1", "2", "0.5", "agrees"),
        ("1", "2", "2", "disagrees"),
        ("1e3", "500", "2", "agrees"),
    ],
)
def test_a_ratio_agrees_within_the_printed_digits(
    tmp_path: Path, of: str, over: str, ratio: str, arithmetic: str
) -> None:
    found = verdict(tmp_path, measurement("new", value=of), measurement("old", value=over), ratio=ratio)
    assert found.arithmetic == arithmetic
    assert found.verdict is (LIKE if arithmetic == "agrees" else Verdict.WRONG_ARITHMETIC)


def test_printed_digits() -> None:
    assert _range(Decimal("1.50")) == (Decimal("1.495"), Decimal("1.505"))
    assert _range(Decimal("842")) == (Decimal("841.5"), Decimal("842.5"))
    assert _range(Decimal("8e2")) == (Decimal("750"), Decimal("850"))


def test_a_span_must_reach_its_smallest_and_largest_ratio(published: ClaimFile) -> None:
    claim = published.claim("clean-range")
    for low, high, arithmetic in (
        ("1.3", "1.9", "agrees"), ("1.31", "1.88", "agrees"), ("1.3", "2.0", "disagrees"),
        ("1.4", "1.9", "disagrees"), ("1.2", "1.9", "disagrees"),
    ):  # fmt: skip
        found = judge(published, claim.model_copy(update={"low": Decimal(low), "high": Decimal(high)}))
        assert found.arithmetic == arithmetic
        assert found.verdict is (LIKE if arithmetic == "agrees" else Verdict.WRONG_ARITHMETIC)
    found = judge(published, claim.model_copy(update={"spans": ("tp8-b1", "agents")}))
    assert found.verdict is NOT and "agents: not like for like" in found.parts


def test_one_figure_needs_its_premises(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    claim = {"name": "c", "text": "100 tokens/s", "of": "new"}
    path.write_text(HEAD + table("measurement", measurement("new")) + table("claim", claim))
    file = load_claims(path)
    assert judge(file, file.claim("c")).verdict is Verdict.STATED
    assert judge_all("c", file).holds
    short = {k: v for k, v in SERVING.items() if k != "batch"}
    path.write_text(HEAD + table("measurement", measurement("new", premises=short)) + table("claim", claim))
    file = load_claims(path)
    found = judge(file, file.claim("c"))
    assert found.verdict is UNKNOWN and [m.premise for m in found.missing] == ["batch"]
    assert "not stated: batch" in list(lines(found))


# The file


def test_shared_premises_and_likes_and_unknowns(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    new = measurement("new", premises={"cards": 16, "batch": "unknown"})
    path.write_text(
        'format = 1\n[premises]\nhardware = "H200"\ncards = 8\nbatch = 4\n'
        + table("measurement", new)
        + table(
            "measurement", {"name": "old", "like": "new", "implementation": "old", "premises": {"batch": 3}}
        )
        + table("claim", {"name": "c", "text": "x", "of": "new", "over": "old"})
    )
    file = load_claims(path)
    assert file.measurement("new").premises == {"hardware": "H200", "cards": 16}
    assert file.measurement("old").premises == {"hardware": "H200", "cards": 16, "batch": 3}
    assert file.measurement("new").value == 100 and file.measurement("old").value is None


def test_no_damage_to_a_file_is_an_internal_error(tmp_path: Path) -> None:
    text = BUILT_IN["k3-published"].read_text().splitlines()
    rng, path, refused = random.Random(0), tmp_path / "c.toml", 0
    values = ("3", '"x"', "true", "[]", "{}", "[1]", "1e400", "nan", "-1", '""', '"unknown"', "1979-05-27")
    for _ in range(200):
        lines_ = list(text)
        at = rng.randrange(len(lines_))
        key, equals, _rest = lines_[at].partition("=")
        if equals and rng.random() < 0.7:
            lines_[at] = f"{key}= {rng.choice(values)}"
        elif rng.random() < 0.5:
            del lines_[at]
        else:
            lines_.insert(rng.randrange(len(lines_)), lines_[at])
        path.write_text("\n".join(lines_))
        try:
            document = judge_all("", load_claims(path))
        except WorkbenchError as e:
            refused += 1
            assert "\n" not in str(e)
        else:
            assert all(list(lines(c)) for c in document.claims)
    assert 50 < refused < 200


GOOD = (measurement("new"), measurement("old"))


def one(**changed: Any) -> str:
    """A file of one measurement, `a`."""
    return HEAD + table("measurement", measurement("a", **changed))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has format None; a claim file begins with `format = 1`"),
        ("format = 2", "has format 2"),
        ("format = true", "has format True"),
        ("format = ", "is not TOML"),
        ("format = 1", "claims nothing"),
        ("format = 1\nmeasurement = 3", "measurement is no list of tables"),
        ("format = 1\npremises = 3", "premises a table"),
        ("format = 1\n[[measurement]]", "measurement 1 has no name"),
        (one() + table("measurement", measurement("a")), "two entries [[measurement]] named 'a'"),
        (HEAD + table("claim", {"name": "c", "text": "x", "of": "a"}), "claim c: unknown measurement 'a'"),
        (HEAD + table("claim", {"name": "c", "text": "x"}), "claim c: a claim needs `of`"),
        (one(like="b"), "unknown measurement above it 'b'"),
        (one(valeu="3"), "measurement a: valeu: Extra inputs"),
        (one(source=""), "measurement a: source: String should have"),
        (one(value="fast"), "measurement a: value: 'fast' is no number"),
        (one(value="nan"), "'nan' is not positive and finite"),
        (one(value="-1"), "'-1' is not positive"),
        (one(value=True), "a figure is a number"),
        (one(value="1e999999"), "'1e999999' is no figure that anybody prints"),
        (one(value="1." + "0" * 60), "is no figure that anybody prints"),
        (one(kind="guessed"), "measurement a: kind: Input should be"),
        (one(premises={"card": 8}), "unknown premise 'card'; nearest: cards"),
        (one(premises={"cards": "8"}), "cards is a whole number from 1"),
        (one(premises={"batch": 0}), "batch is a whole number from 1"),
        (one(premises={"prefill": "some"}), "prefill is one of none"),
        (one(premises={"acceptance": "good"}), "acceptance is one of"),
        (one(record="x"), "`from` is the path of a document"),
        (one() + "[[claims]]\nname = 'c'", "has 'claims', which no"),
        (one(premises={"load": " "}), "load is empty"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ContentError) as e:
        load_claims(path)
    assert complaint in str(e.value) and str(e.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ({"varies": "colour"}, "unknown premise 'colour'"),
        ({"alike": ["btach"]}, "unknown premise 'btach'; nearest: batch"),
        ({"alike": ["batch"]}, "batch is alike, and both sides state it: 4, 4"),
        ({"alike": ["load"], "varies": "load"}, "load both varies and is alike"),
        ({"varies": "batch"}, "nothing varies: batch is 4 on both sides"),
        ({"over": "new"}, "it compares new with itself"),
        ({"low": "1", "high": "2"}, "`low` and `high` belong to a claim with `spans`"),
        ({"spans": ["c"]}, "a claim with `spans` has `low` and `high`, and no `of`"),
        ({"ratio": "0"}, "'0' is not positive"),
    ],
)
def test_a_claim_that_says_nothing_clear_is_refused(
    tmp_path: Path, claim: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ContentError, match="claim c: ") as e:
        load_claims(written(tmp_path / "c.toml", *GOOD, **claim))
    assert complaint in str(e.value)


def test_what_cannot_hold_together() -> None:
    assert contradiction({"draft_tokens": 0, "acceptance": "observed"})
    assert contradiction({"draft_tokens": 3, "acceptance_length": 4.5})
    assert contradiction({"speculation": "off", "draft_tokens": 3})
    assert contradiction({"speculation": "on", "draft_tokens": 0})
    assert contradiction({"prefill": "none", "prefill_share": 0.1})
    assert not contradiction(SERVING) and not contradiction({})
    assert problem("acceptance_length", True) and problem("prefill_share", 1.5)


def test_a_claim_file_is_found_by_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("k3-published") == (BUILT_IN["k3-published"], None)
    assert find("k3-published:tp8-b1") == (BUILT_IN["k3-published"], "tp8-b1")
    (tmp_path / "a:b.toml").write_text("")
    assert find("a:b.toml") == (Path("a:b.toml"), None)
    assert find("a:b.toml:c") == (Path("a:b.toml"), "c")
    with pytest.raises(WorkbenchError, match=r"there is no file nothing\.toml"):
        find("nothing.toml")


def test_premises_in_words() -> None:
    assert told({}) == ()
    assert told({"acceptance_length": 2, "cards": 1, "draft_tokens": 1}) == (
        "1 card", "1 draft token", "acceptance length 2",
    )  # fmt: skip


# The documentation


def test_the_documentations_example_and_its_list_of_premises(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "claims.md").read_text()
    (tmp_path / "pr.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    (found,) = judge_all("", load_claims(tmp_path / "pr.toml")).claims
    assert found.verdict is LIKE and found.arithmetic == "agrees"
    assert [name for name in TERMS if f"`{name}`" not in text] == []
    assert [v.value for v in Verdict if f"| `{v.value}` |" not in text] == []
