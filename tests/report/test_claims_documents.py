from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cli.conftest import run as run_fixture
from tests.records.test_records import make_record
from tests.report.conftest import prediction
from workbench.agent.run import RunResult
from workbench.errors import WorkbenchError
from workbench.export.evidence.bundle import MeasuredTime
from workbench.export.evidence.make import make_bundle
from workbench.records import Objective
from workbench.report.claims import Verdict, judge_all, load_claims, pair
from workbench.report.claims.documents import measured_in
from workbench.workspace import Workspace

run = run_fixture

TIMING: dict[str, Any] = {
    "kernel": "fast",
    "device": {"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90a", "driver": "13.0"},
    "method": "graph",
    "l2": "flushed",
    "flush_bytes": 268435456,
    "warmup": 10,
    "chains": 1,
    "samples_us": [11.0, 9.5, 10.0],
    "host_us": 1.0,
    "kind": "measured",
}


def put(path: Path, *documents: object) -> Path:
    path.write_text("\n".join(json.dumps(d) for d in documents))
    return path


def record(path: Path, *values: float, **changes: Any) -> Path:
    made = [make_record(v, artifact_key=f"{v}kernel", **changes) for v in values]
    path.write_text("".join(f"{r.model_dump_json()}\n" for r in made))
    return path


# What each document says


def test_a_run_says_what_was_predicted(result: RunResult, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(result.model_dump_json())
    found = measured_in(tmp_path / "run.json")
    assert (found["value"], found["unit"], found["kind"]) == ("4.250", "us", "predicted")
    assert found["scope"] == "kernel" and found["source"] == "run rmsnorm-latent_b1-1"
    assert found["premises"] == {
        "hardware": "gb300",
        "op": "rmsnorm",
        "workload": "latent_b1",
        "axes": "B=1 N=3584",
        "arch": "sm_103a",
        "protocol": f"premises {prediction(4.25).premises.hash[:12]}",
    }
    for broken, why in (({"winner": None}, "has no winner"), ({"winner": 3}, "has no predicted time")):
        (tmp_path / "bad.json").write_text(result.model_copy(update=broken).model_dump_json())
        with pytest.raises(WorkbenchError, match=why):
            measured_in(tmp_path / "bad.json")


def test_records_say_what_their_objective_is(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", 5.0)
    assert measured_in(path)["kind"] == "predicted"
    path = record(tmp_path / "m.jsonl", 5.0, 6.25, objective=Objective.MEASURED, device="NVIDIA H200")
    ids = [make_record(v, artifact_key=f"{v}kernel", objective=Objective.MEASURED, device="NVIDIA H200").id
           for v in (5.0, 6.25)]  # fmt: skip
    assert measured_in(path, ids[1]) == measured_in(path, ids[1][:6])
    found = measured_in(path, ids[1][:6])
    assert (found["value"], found["kind"]) == ("6.250", "measured")
    assert found["premises"]["hardware"] == "NVIDIA H200" and found["premises"]["protocol"] == "premises p0"
    with pytest.raises(WorkbenchError, match=rf"2 measurements for `record = None`; it has '{ids[0][:16]}'"):
        measured_in(path)
    with pytest.raises(WorkbenchError, match="no measurement for `record = 'zz'`"):
        measured_in(path, "zz")
    for one_or_two in (path, record(tmp_path / "one.jsonl", 5.0)):
        with pytest.raises(WorkbenchError, match="`record` is empty"):
            measured_in(one_or_two, "")


@pytest.mark.parametrize("changes", [{"verdict": "fail"}, {"verdict": "unknown"}, {"verdict": None}])
def test_a_time_that_was_not_verified_is_no_claim(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(WorkbenchError, match=r"not verified, .*; it can be no claim"):
        measured_in(record(tmp_path / "r.jsonl", 5.0, **changes))


def test_a_timing_is_measured_and_carries_its_protocol(tmp_path: Path) -> None:
    found = measured_in(put(tmp_path / "t.json", TIMING))
    assert (found["value"], found["kind"], found["source"]) == ("10.00", "measured", "3 samples")
    assert found["premises"] == {
        "hardware": "NVIDIA H200",
        "arch": "sm_90a",
        "driver": "13.0",
        "protocol": "method=graph l2=flushed flush_bytes=268435456 chains=1",
    }


REPOSITORY = Workspace(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def winner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a verified, predicted and exported kernel."""
    root = tmp_path_factory.mktemp("claims")
    for name in ("verifiers", "templates"):
        (root / name).symlink_to(REPOSITORY.root / name)
    workspace = Workspace(root)
    kernel = wb.compile_kernel("row", op="rmsnorm", workload="small_b1", workspace=workspace)
    document = wb.export_kernel(kernel, workspace=workspace)
    return root / document.folder


def test_a_winner_says_what_was_predicted(winner: Path) -> None:
    manifest = json.loads((winner / "manifest.json").read_text())
    found = measured_in(winner)
    assert found == measured_in(winner / "manifest.json") and found["kind"] == "predicted"
    assert float(found["value"]) == pytest.approx(manifest["prediction"]["us"], rel=1e-3)
    assert found["premises"]["op"] == manifest["op"] and manifest["key"][:12] in found["implementation"]


def timed(key: str) -> MeasuredTime:
    said = {k: v for k, v in TIMING.items() if k != "kernel"}
    return MeasuredTime.model_validate({**said, "artifact_key": key, "generator": "ordinary", "seed": 3})


def test_a_timing_beside_its_kernel_knows_its_op(winner: Path, tmp_path: Path) -> None:
    manifest = json.loads((winner / "manifest.json").read_text())
    for key, known in ((manifest["key"], True), ("another", False)):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        (tmp_path / "timing.json").write_text(timed(key).model_dump_json())
        found = measured_in(tmp_path / "timing.json")
        assert found["premises"]["inputs"] == "ordinary, seed 3" and found["kind"] == "measured"
        assert (found["premises"].get("op") == manifest["op"]) == known
        assert (found["premises"].get("workload") == manifest["workload"]) == known


def test_a_bundle_of_evidence_holds_predicted_and_measured(winner: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "evidence.tar"
    workspace = Workspace(winner.parents[3])
    make_bundle(workspace, bundle, [winner], measure=lambda kernel: timed(kernel.manifest.key))
    key = json.loads((winner / "manifest.json").read_text())["key"][:12]
    predicted, measured = (measured_in(bundle, f"{key}/{kind}") for kind in ("predicted", "measured"))
    assert predicted == measured_in(winner)
    assert (measured["value"], measured["kind"]) == ("10.00", "measured")
    assert measured["premises"]["op"] == predicted["premises"]["op"]
    with pytest.raises(WorkbenchError, match=f"2 measurements .* '{key}/predicted', '{key}/measured'"):
        measured_in(bundle)
    with pytest.raises(WorkbenchError, match="nothing varies: implementation is"):
        pair(f"{bundle}:{key}/measured", f"{bundle}:{key}/predicted")
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    with pytest.raises(WorkbenchError, match="get it anew"):
        measured_in(bundle, key)


def test_the_check_on_a_gpu_holds_a_timing_a_method(tmp_path: Path) -> None:
    rests = {"device": "NVIDIA H200", "arch": "sm_90a", "driver": "13.0", "method": "graph", "chains": 1}
    measured = {
        "events, flushed": {"failed": "no"},
        "graph, flushed": {"samples_us": [3.0, 1.0, 2.0], "premises": {**rests, "l2": "flushed"}},
        "graph, warm": {"samples_us": [1.0], "premises": {**rests, "l2": "warm"}},
    }
    row = {"record": "timing", "op": "moe", "workload": "tp8_b1", "measured": measured}
    rows = [{"record": "family"}, {**row, "kernel": "moe a"}, {**row, "kernel": "moe b"}]
    document = {"machine": {}, "sections": [{"records": []}, {"records": rows}]}
    path = put(tmp_path / "results.json", document)
    found = measured_in(path, "moe a/graph, f")
    assert (found["value"], found["implementation"]) == ("2.000", "moe a")
    assert found["premises"]["op"] == "moe" and "l2=flushed" in found["premises"]["protocol"]
    with pytest.raises(WorkbenchError, match="2 measurements for `record = 'moe b'`"):
        measured_in(path, "moe b")
    (judged,) = judge_all("", pair(f"{path}:moe a/graph, warm", f"{path}:moe b/graph, flushed")).claims
    assert [d.premise for d in judged.differs] == ["protocol"] and judged.ratio is None
    (judged,) = judge_all("", pair(f"{path}:moe a/graph, warm", f"{path}:moe b/graph, warm", "1.0")).claims
    assert judged.verdict is Verdict.LIKE_FOR_LIKE and judged.kind == "measured"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("nonsense", "doc:1 is no JSON"),
        ('{"a": 1}\n{"b"', "doc:2 is no JSON"),
        ("[1]", "is no JSON object"),
        ("{}", "is no document with a measurement"),
        ("[" * 100_000, "nested too deeply"),
        ('{"candidates": [], "winner": 0}', "is not what this workbench writes: settings"),
        ('{"prediction": null, "files": {}}', "is not what this workbench writes: key"),
        ('{"key": {}, "value_us": 1}', "is not what this workbench writes: key.op"),
        (json.dumps(TIMING) + "\n" + json.dumps(TIMING), "holds 2 documents that are no tuning records"),
        (json.dumps(TIMING | {"samples_us": []}), "samples_us: Tuple should have at least 1 item"),
        (json.dumps(TIMING | {"samples_us": [1.0, 0]}), "samples_us.1: Input should be greater than 0"),
        (json.dumps(TIMING | {"samples_us": [1.0, "2"]}), "samples_us.1: Input should be a valid number"),
        (json.dumps(TIMING | {"samples_us": [float("inf")]}), "samples_us.0: Input should be a finite"),
        (json.dumps(TIMING | {"device": {"arch": "sm_90a"}}), "device.name: Field required"),
        ('{"machine": {}, "sections": 3}', "is not what this workbench writes: sections"),
        ('{"machine": {}, "sections": []}', "it has none"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "doc").write_text(text)
    with pytest.raises(WorkbenchError) as e:
        measured_in(tmp_path / "doc")
    assert complaint in str(e.value)
    with pytest.raises(WorkbenchError, match="cannot be read"):
        measured_in(tmp_path / "none")


def altered(document: Any, rng: random.Random) -> Any:
    """The document with one value removed or made something else."""
    changed = copy.deepcopy(document)
    place, places = changed, []
    while isinstance(place, dict | list) and place:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        places.append((place, key))
        place = place[key]
    held, key = rng.choice(places)
    if rng.random() < 0.3:
        del held[key]
    else:
        held[key] = rng.choice([None, -1, "x", True, [], {}, [1], {"a": 1}, float("inf"), float("nan"), ""])
    return changed


def test_no_damage_to_a_document_is_an_internal_error(
    result: RunResult, winner: Path, tmp_path: Path
) -> None:
    rests = {"device": "H200", "method": "graph", "l2": "warm", "chains": 1}
    row = {"record": "timing", "kernel": "a", "measured": {"m": {"samples_us": [1.0], "premises": rests}}}
    whole = [
        json.loads((winner / "manifest.json").read_text()),
        json.loads(result.model_dump_json()),
        json.loads(make_record(5.0).model_dump_json()),
        json.loads(timed("k").model_dump_json()),
        TIMING,
        {"machine": {}, "sections": [{"records": [row]}]},
        {k: v for k, v in SERVED.items() if "_ms" not in k and k != "request_throughput"},
    ]
    rng, refused = random.Random(0), 0
    for document in whole:
        assert measured_in(put(tmp_path / "doc", document))["unit"] in ("us", "tokens/s")
        for _ in range(40):
            try:
                measured_in(put(tmp_path / "doc", altered(document, rng)))
            except WorkbenchError as e:
                refused += 1
                assert "\n" not in str(e)
    assert refused > 100


# Benchmarks of a served model


SERVED: dict[str, Any] = {
    "date": "20261130-010203",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "model_id": "moonshotai/Kimi-K3",
    "num_prompts": 32,
    "hardware": "GB300",
    "cards": "8",
    "parallelism": "TP8",
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 4,
    "duration": 10.0,
    "completed": 32,
    "failed": 0,
    "total_input_tokens": 32768,
    "total_output_tokens": 16384,
    "request_throughput": 3.2,
    "output_throughput": 1638.4,
    "mean_tpot_ms": 9.0,
    "median_tpot_ms": 8.469,
    "std_tpot_ms": 0.1,
    "p99_tpot_ms": 12.0,
    "median_e2el_ms": 4000.0,
}


def test_a_benchmark_states_what_it_knows(tmp_path: Path) -> None:
    path = put(tmp_path / "bench.json", SERVED)
    found = measured_in(path, "median_tpot_ms")
    assert (found["value"], found["unit"], found["quantity"]) == ("8.469", "ms", "median TPOT")
    assert found["premises"] == {
        "hardware": "GB300",
        "cards": 8,
        "parallelism": "TP8",
        "batch": 4,
        "load": "32 prompts at rate inf",
        "input_tokens": 1024,
        "output_tokens": 512,
    }
    assert found["implementation"] == "vllm moonshotai/Kimi-K3"
    assert measured_in(path, "p99_tpot_ms")["quantity"] == "P99 TPOT"
    for metric in ("output_throughput", "median_e2el_ms"):
        assert measured_in(path, metric)["premises"]["prefill"] == "counted"
    with pytest.raises(
        WorkbenchError, match=r"6 measurements for `record = None`; it has 'request_throughput'"
    ):
        measured_in(path)
    with pytest.raises(WorkbenchError, match="no measurement for `record = 'std_tpot_ms'`"):
        measured_in(path, "std_tpot_ms")
    put(path, SERVED | {"completed": 30})
    with pytest.raises(WorkbenchError, match="2 of 32 requests failed; it can be no claim"):
        measured_in(path, "median_tpot_ms")
    put(path, SERVED, SERVED | {"median_tpot_ms": 7.0})
    assert measured_in(path, "2/median_tpot_ms")["value"] == "7.000"


def test_speculation_in_a_benchmark(tmp_path: Path) -> None:
    said = {
        "spec_decode_acceptance_length": 3.7812,
        "spec_decode_num_drafts": 100,
        "spec_decode_draft_tokens": 700,
        "spec_decode_accepted_tokens": 278,
    }
    found = measured_in(put(tmp_path / "bench.json", SERVED | said), "output_throughput")
    assert found["premises"]["acceptance_length"] == 3.78 and found["premises"]["draft_tokens"] == 7
    assert "acceptance" not in found["premises"], "whose it was, the file does not know"


def test_two_benchmarks_make_a_claim_when_the_rest_is_stated(tmp_path: Path) -> None:
    known = {"draft_tokens": "0", "implementation": "stock"}
    old = put(tmp_path / "old.json", SERVED | known)
    new = put(tmp_path / "new.json", SERVED | known | {"implementation": "ours", "output_throughput": 2000.0})
    sides = [f"{p}:output_throughput" for p in (new, old)]
    (found,) = judge_all("", pair(*sides, "1.22")).claims
    assert found.verdict is Verdict.LIKE_FOR_LIKE and found.arithmetic == "agrees"
    assert "prefill counted" in found.conditions
    (found,) = judge_all("", pair(*(s.replace("output_throughput", "median_tpot") for s in sides))).claims
    assert found.verdict is Verdict.UNKNOWN and [m.premise for m in found.missing] == ["prefill"]
    put(new, SERVED | known | {"implementation": "ours", "max_concurrency": 8})
    (found,) = judge_all("", pair(*sides)).claims
    assert [str(d) for d in found.differs] == ["batch: 8 against 4"]


# Two documents


def test_two_records_of_the_same_premises(tmp_path: Path) -> None:
    new, old = (str(record(tmp_path / f"{n}.jsonl", v)) for n, v in (("new", 4.0), ("old", 6.0)))
    document = judge_all(new, pair(new, old, "1.5"))
    (found,) = document.claims
    assert document.holds and found.kind == "predicted" and found.arithmetic == "agrees"
    assert found.ratio is not None and found.ratio.value == 1.5
    assert "predicted, not measured" in found.conditions
    (found,) = judge_all(new, pair(new, old, "1.6")).claims
    assert found.verdict is Verdict.WRONG_ARITHMETIC
    (found,) = judge_all(new, pair(old, new, None)).claims
    assert found.ratio is not None and found.ratio.value == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("field", "value", "premise"),
    [
        ("op", "kda", "op"),
        ("workload", "tp8_b2", "workload"),
        ("axes", {"B": 2, "H": 7168}, "axes"),
        ("arch", "sm_100a", "arch"),
        ("device", "h200", "hardware"),
        ("premises", "p1", "protocol"),
        ("objective", Objective.MEASURED, "kind"),
    ],
)
def test_two_records_of_other_premises(tmp_path: Path, field: str, value: Any, premise: str) -> None:
    new = record(tmp_path / "new.jsonl", 4.0, **{field: value})
    (found,) = judge_all("", pair(str(new), str(record(tmp_path / "old.jsonl", 6.0)))).claims
    assert found.verdict is Verdict.NOT_LIKE_FOR_LIKE and found.ratio is None
    assert [d.premise for d in found.differs] == [premise]


def test_a_measured_and_a_predicted_time_never_make_a_ratio(tmp_path: Path) -> None:
    new, old = put(tmp_path / "t.json", TIMING), record(tmp_path / "old.jsonl", 60.0)
    (found,) = judge_all("", pair(str(new), str(old), "6")).claims
    assert found.verdict is Verdict.NOT_LIKE_FOR_LIKE and found.ratio is None
    assert "kind: predicted against measured" in map(str, found.differs)


def test_a_timing_does_not_know_its_op(tmp_path: Path) -> None:
    sides = [str(put(tmp_path / f"{k}.json", TIMING | {"kernel": k})) for k in ("fast", "slow")]
    (found,) = judge_all("", pair(*sides)).claims
    assert found.verdict is Verdict.UNKNOWN
    assert [m.premise for m in found.missing] == ["op", "workload"]


# A claim file of one's own


CLAIM = """
format = 1
title = "Our decode step"

[[measurement]]
name = "new"
from = "fast.json"
premises = { op = "moe", workload = "tp8_b1" }

[[measurement]]
name = "old"
from = "slow.json"
premises = { op = "moe", workload = "tp8_b1" }

[[claim]]
name = "moe"
text = "1.2 times as fast"
ratio = "1.2"
of = "old"
over = "new"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    put(tmp_path / "fast.json", TIMING)
    put(tmp_path / "slow.json", TIMING | {"kernel": "slow", "samples_us": [12.0]})
    (tmp_path / "mine.toml").write_text(CLAIM)
    return tmp_path / "mine.toml"


def test_documents_and_premises_of_a_claim_file(mine: Path) -> None:
    file = load_claims(mine)
    assert file.measurement("new").source == "fast.json 3 samples"
    (found,) = judge_all("", file).claims
    assert found.verdict is Verdict.LIKE_FOR_LIKE and found.kind == "measured"
    mine.write_text(CLAIM.replace('op = "moe", workload', 'arch = "sm_100a", workload', 1))
    with pytest.raises(
        WorkbenchError, match=r"arch is 'sm_100a' here and 'sm_90a' in fast\.json; leave it out"
    ):
        load_claims(mine)
    mine.write_text(CLAIM.replace('from = "fast.json"', 'from = "fast.json"\nvalue = "1"', 1))
    with pytest.raises(WorkbenchError, match=r"value is '1' here and '10\.00' in"):
        load_claims(mine)
    mine.write_text(CLAIM.replace("fast.json", "gone.json"))
    with pytest.raises(WorkbenchError, match=r"measurement new: .*gone\.json cannot be read"):
        load_claims(mine)


# The command


def test_the_command_judges_and_exits_accordingly(run: Any, mine: Path, tmp_path: Path) -> None:
    done = run("report", "--claim", str(mine))
    assert done.code == 0 and "like for like: 1.2 times as fast (moe)" in done.out
    document = run("report", "--claim", f"{mine}:moe", "--json").json("claims")
    assert document["holds"] and document["claims"][0]["ratio"]["value"] == pytest.approx(1.2)
    mine.write_text(CLAIM.replace("1.2", "1.3"))
    assert run("report", "--claim", str(mine)).code == 1
    mine.write_text(CLAIM.replace('workload = "tp8_b1" }', "}", 1).replace('"moe",', '"moe"', 1))
    done = run("report", "--claim", str(mine))
    assert done.code == 1 and "not stated: workload of fast" in done.out
    assert run("report", "--claim", str(mine), "--strict").code == 3


def test_the_published_table_by_the_command(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no workspace is needed
    done = run("report", "--claim", "k3-published", "--json")
    verdicts = {c["name"]: c["verdict"] for c in done.json("claims")["claims"]}
    assert done.code == 1 and len(verdicts) == 16
    assert verdicts["tp8-b1"] == "like for like" and verdicts["agents"] == "not like for like"
    for name, code in (("tp8-b1", 0), ("tp16-synthetic", 0), ("agents", 1), ("third-party", 1)):
        assert run("report", "--claim", f"k3-published:{name}", "--quiet").code == code
    assert run("report", "--claim", "k3-published:third-party", "--strict").code == 3
    assert run("report", "--claim", "k3-published:agents", "--strict").code == 1
    assert run("report", "--claim", "k3-published", "--to", "claims.md").code == 1
    text = (tmp_path / "claims.md").read_text()
    assert text.startswith("# Published figures") and text.count("| unknown |") == 9
    assert "differs: cards: 16 against 8" in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("last --claim k3-published", "shows no run"),
        ("--over x", "belong to --claim"),
        ("--strict", "belong to --claim"),
        ("--claim k3-published --times 2", "--times needs --over"),
        ("--claim nothing.toml", "there is no file nothing.toml"),
        ("--claim k3-published:tp9", "unknown claim 'tp9'; nearest: tpot, tp8-b1"),
        ("--claim timing.json", "timing.json: is a document, not a claim file; set it against another"),
        ("--claim k3-published --to claims.html", "ends in .md"),
        ("--claim k3-published --over k3-published", "1 is no JSON"),
    ],
)
def test_bad_words_are_one_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "timing.json", TIMING)
    assert complaint in run("report", *words.split()).complaint


def test_a_ratio_that_is_no_number_is_refused(run: Any, mine: Path) -> None:
    sides = [str(mine.parent / name) for name in ("fast.json", "slow.json")]
    assert (
        "'quick' is no number"
        in run("report", "--claim", sides[0], "--over", sides[1], "--times", "quick").complaint
    )
