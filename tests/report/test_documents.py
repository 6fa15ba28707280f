from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from workbench.agent.run import RunResult
from workbench.errors import UnknownNameError
from workbench.report.documents import json_schema, schemas
from workbench.verify.report import Check, Report, Verdict

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def test_every_published_schema_is_that_of_its_model() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.json")) == sorted(schemas())
    for name in schemas():
        written = json.loads((FOLDER / f"{name}.json").read_text())
        assert written == json_schema(name), (
            f"run `workbench report --schema {name} > docs/schemas/{name}.json`"
        )


@pytest.mark.parametrize("name", sorted(schemas()))
def test_a_schema_is_one_and_documents_its_fields(name: str) -> None:
    schema = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object" and schema["description"]


def test_an_unknown_schema_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="nearest: verify"):
        json_schema("verfy")


def test_floats_that_json_lacks_survive_and_validate() -> None:
    check = Check(name="n", verdict=Verdict.FAIL, measures={"a": float("inf"), "b": float("nan"), "c": 1.5})
    report = Report(
        op="o",
        workload="w",
        template="t",
        knobs={"a": 1, "b": True, "c": "x"},
        arch="sm_103a",
        artifact_key="k",
        device="simulator",
        checks=(check,),
    )
    text = report.model_dump_json()
    jsonschema.validate(json.loads(text), json_schema("verify"))
    measures = Report.model_validate_json(text).checks[0].measures
    assert measures["a"] == float("inf") and measures["b"] != measures["b"] and measures["c"] == 1.5
    assert json.loads(text)["verdict"] == "fail"


def test_a_run_validates_and_reads_back(result: RunResult) -> None:
    text = result.model_dump_json()
    jsonschema.validate(json.loads(text), json_schema("propose"))
    assert RunResult.model_validate_json(text) == result
