"""The exported plugin in vLLM 0.33.0 itself, on the CPU; `plugin_serving.py` has what runs inside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package of `export --to vllm`."""
    from tests.export.module_winners import compiled, put
    from workbench.export.module import write_module
    from workbench.workspace import Workspace

    root = tmp_path_factory.mktemp("plugin")
    space = put(Workspace(root / "space"), compiled("rmsnorm", "small_b1"))
    write_module(space, root / "project", plugin=True)
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    target = ["--target", str(root / "site"), str(root / "project")]
    subprocess.run([sys.executable, "-m", "pip", *install, *target], check=True)
    return root / "site"


def python(site: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        **{n: os.environ[n] for n in ("PATH", "HOME") if n in os.environ},
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT), str(HERE))),
        "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_KIMI_K3_GEMM_AR": "0", "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(site.parent / "cache"), "PYTHONDONTWRITEBYTECODE": "1", **more,
    }  # fmt: skip
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=site.parent, check=False)


def inside(site: Path, scenario: str, **more: str) -> dict[str, Any]:
    done = python(site, "-m", "plugin_serving", scenario, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "log": done.stderr + done.stdout}


def test_vllms_loader_registers_the_subclass(site: Path) -> None:
    told = inside(site, "registry")
    assert told["class"] == "k3_decode.vllm.model:KimiLinearForCausalLM" and told["base"]
    assert told["resolves_to"] == "k3_decode.vllm:KimiLinearForCausalLM"
    assert told["overrides"] == ["__init__", "build_specialized_decode"] and told["same"] and told["info"]
    assert told["state"] == "registered" and "1 kernels for sm_103a" in told["detail"]
    assert told["metric"] == {"registered": 1.0}
    assert told["log"].count("vLLM plugin registered") <= 1


def test_vllm_inspects_the_subclass_in_a_process_of_its_own(site: Path) -> None:
    told = inside(site, "inspected")
    assert told["architecture"] == "KimiLinearForCausalLM" and told["hybrid"] and told["pp"]


def test_the_command_says_that_it_is_loaded(site: Path) -> None:
    done = python(site, "-m", "k3_decode.vllm")
    assert done.returncode == 0 and ": registered: off unless additional_config has the key" in done.stdout
    assert (done.stdout + done.stderr).count("vLLM plugin registered") == 1, "one log line"


def test_without_the_key_nothing_is_touched(site: Path) -> None:
    told = inside(site, "untouched")
    assert told["attributes"] and told["parameters"] and told["bytes"]
    assert told["norm_in_logits"] == [True, True] and told["state"] == "registered"


def test_everything_that_is_not_supported_is_refused_at_once(site: Path) -> None:
    told = inside(site, "refused")
    lines = told["error"].splitlines()
    assert lines[0].startswith("k3_decode does not support this deployment, for ")
    assert f"for {len(lines) - 1} reasons" in lines[0] and len(lines) >= 9
    for reason in (
        "there is no setting 'mod'; nearest: mode",
        "decode_backend 'latency_specialized'",
        "kernels need a CUDA device",
        "num_experts_per_token 4 (wanted 16)",
        "tensor parallelism 4",
        "expert parallelism",
        "KV cache dtype 'auto'",
        "KDA caches of bfloat16 and bfloat16",
    ):
        assert reason in told["error"], reason
    assert told["state"] == "refused" and not told["ok"] and told["metric"]["refused"] == 1.0


def test_vllms_forward_runs_decode_and_verify_steps_by_the_executor(site: Path) -> None:
    told = inside(site, "served")
    steps = told["steps"]
    assert [s["rows"] for s in steps] == [5, 2, 4, 5, 8, 16]
    assert all(s["off"] < 1e-2 for s in steps), steps
    status = told["status"]
    assert status["state"] == "active" and status["ok"] and status["plans"] == {"taken": 4}
    assert status["repacked_bytes"] > 0 and "feed_forward in 5 layers" in status["executor"]
    assert "copied: convolution taps" in status["executor"]
    assert not told["norm_in_logits"] and told["model_state"] == "KimiK3ModelState"
    assert told["metric"] == {"registered": 0.0, "active": 1.0}


# A broken plugin


def broken(site: Path, tmp_path: Path, file: str, text: str | None) -> Path:
    """The installed package with a file altered, or removed."""
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    if text is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(text)
    return copy


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("k3_decode/manifest.json", "{}", "manifest.json differs from what was exported"),
        ("k3_decode/vllm/executor.py", "import nothing_like_this\n", "nothing_like_this"),
        ("k3_decode/vllm/parts.py", None, "cannot import name 'parts'"),
        ("k3_decode/vllm/__init__.py", "def register(:\n", "invalid syntax"),
        ("k3_decode/table.py", "raise RuntimeError('torn')\n", "torn"),
    ],
)
def test_a_broken_plugin_is_noticed_and_harms_none_who_did_not_ask(
    site: Path, tmp_path: Path, file: str, text: str | None, reason: str
) -> None:
    altered = broken(site, tmp_path, file, text)
    told = inside(altered, "asked")
    assert "k3_decode does not support this deployment" in told["error"] and reason in told["error"]
    assert told["log"].count("vLLM plugin broken") == 1, "one log line"
    assert told["metric"] in ({"broken": 1.0}, {"refused": 1.0}) and told["stock"]
    done = python(altered, "-m", "k3_decode.vllm")
    assert done.returncode == 1 and reason in done.stdout + done.stderr


def test_a_plugin_that_vllm_was_told_to_leave_out_is_noticed(site: Path) -> None:
    done = python(site, "-m", "k3_decode.vllm", VLLM_PLUGINS="another")
    assert done.returncode == 1 and "filtered: VLLM_PLUGINS is 'another'" in done.stdout
