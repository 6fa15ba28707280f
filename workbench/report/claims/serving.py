"""Results of `vllm bench serve --save-result`: each metric with the premises that the file states.

The file knows its load and lengths, and neither the machine nor the server. What it lacks is added in the
claim file, or when the benchmark is run: `--metadata hardware=GB300 cards=8 parallelism=TP8` is read too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from workbench.report.claims.premises import TERMS, Value

_RATES = {
    "request_throughput": ("request throughput", "requests/s"),
    "output_throughput": ("output throughput", "tokens/s"),
    "total_token_throughput": ("total token throughput", "tokens/s"),
}
_TIME = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el)_ms")
_Count = Annotated[int, Field(ge=0, strict=True)]


class ServeResult(BaseModel):
    """One line of results; what else it holds are metrics and metadata."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="allow")

    num_prompts: Annotated[int, Field(gt=0, strict=True)]
    completed: _Count
    total_input_tokens: _Count
    total_output_tokens: _Count = 0
    max_concurrency: Annotated[int | None, Field(gt=0, strict=True)] = None
    request_rate: float | str = "inf"
    burstiness: float | None = None
    label: str | None = None
    backend: str = ""
    model_id: str = ""
    date: str = ""
    spec_decode_acceptance_length: Annotated[float | None, Field(ge=1)] = None
    spec_decode_num_drafts: _Count = 0
    spec_decode_draft_tokens: _Count = 0

    @staticmethod
    def fits(document: dict[str, Any]) -> bool:
        """True if a document is of this kind."""
        return {"num_prompts", "completed", "total_input_tokens"} <= document.keys()

    def measurements(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every metric by its name in the file."""
        for name, value in (self.model_extra or {}).items():
            what = self._metric(name)
            positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
            if what is not None and positive:
                quantity, unit = what
                yield name, self._fields(name, quantity, unit, float(value))

    def _metric(self, name: str) -> tuple[str, str] | None:
        if name in _RATES:
            return _RATES[name]
        time = _TIME.fullmatch(name)
        return None if time is None else (f"{time[1].replace('p', 'P')} {time[2].upper()}", "ms")

    def _fields(self, name: str, quantity: str, unit: str, value: float) -> dict[str, Any]:
        extra = self.model_extra or {}
        said = extra.get("implementation") or self.label or f"{self.backend} {self.model_id}".strip()
        lost = self.num_prompts - self.completed
        return {
            "implementation": str(said) or "not named",
            "quantity": quantity,
            "unit": unit,
            "value": f"{value:#.4g}",
            "kind": "measured",
            "reported_by": "self",
            "source": f"{name}, {self.completed} requests {self.date}".strip(),
            "scope": "serving",
            "premises": self._premises(name),
            "unusable": f"{lost} of {self.num_prompts} requests failed" if lost else "",
        }

    def _premises(self, metric: str) -> dict[str, Value]:
        stated: dict[str, Value] = {"load": self._load()}
        if self.max_concurrency is not None:
            stated["batch"] = self.max_concurrency
        for name, total in (
            ("input_tokens", self.total_input_tokens),
            ("output_tokens", self.total_output_tokens),
        ):
            mean = round(total / self.completed) if self.completed else 0
            if mean:
                stated[name] = mean
        if metric in _RATES or "e2el" in metric:
            stated["prefill"] = "counted"
        if self.spec_decode_acceptance_length is not None:
            stated["acceptance_length"] = round(self.spec_decode_acceptance_length, 2)
        if self.spec_decode_num_drafts and not self.spec_decode_draft_tokens % self.spec_decode_num_drafts:
            stated["draft_tokens"] = self.spec_decode_draft_tokens // self.spec_decode_num_drafts
        for name, value in (self.model_extra or {}).items():
            if name in TERMS and isinstance(value, str | int | float):
                stated[name] = _plain(value)
        return stated

    def _load(self) -> str:
        bursts = "" if self.burstiness in (None, 1.0) else f", burstiness {self.burstiness:g}"
        return f"{self.num_prompts} prompts at rate {self.request_rate}{bursts}"


def _plain(value: Value) -> Value:
    """A number where the text of `--metadata` is one."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                number = kind(value)
            except ValueError:
                continue
            return number if math.isfinite(number) else value
    return value
