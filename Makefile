# Both targets set everything up in .venv from a bare Python 3.11 and may be run again at any time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTERNAL := .venv-external

GPU_CHECK := build/gpu-check
GPU_PYTHON ?= python3

.PHONY: run test test-slow external gpu-check fuzz lint clean

run: $(STAMP)
	$(BIN)/workbench propose --op moe --workload tp8_b1

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not external"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "slow and not external"

# Kernels of other projects, compiled from their installed packages in a virtual environment of their own.
external: $(EXTERNAL)/.installed
	$(EXTERNAL)/bin/python -m pytest -m external tests/external

# Built where .venv is (a CPU will do); what is built travels in build/gpu-check. The run needs that folder alone and
# a python3 with torch, numpy, ml_dtypes, rich and cuda-bindings; without a GPU it says so.
gpu-check:
	if [ -e $(STAMP) ] || [ ! -e $(GPU_CHECK)/plan.json ]; then $(MAKE) $(GPU_CHECK)/plan.json; fi
	$(GPU_PYTHON) $(GPU_CHECK)/run.py

$(GPU_CHECK)/plan.json: $(STAMP) $(wildcard templates/*/*.py verifiers/*.py gpu_check/*.py gpu_check/*/*.py \
		workbench/devices/*.py workbench/ops/*.py workbench/compile/*.py workbench/simulator/*.py \
		workbench/simulator/*/*.py workbench/export/module/*/*.py)
	$(BIN)/python -m gpu_check $(GPU_CHECK)

# Ten minutes a reader; what is found is kept in fuzz/found.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[fuzz]"
	for reader in ptx sass litmus contract audit; do $(BIN)/python fuzz/readers.py $$reader 600 || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

$(EXTERNAL)/.installed: pyproject.toml constraints.txt external/requirements.txt
	$(PYTHON) -m venv $(EXTERNAL)
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable ".[dev]"
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement external/requirements.txt
	touch $(EXTERNAL)/.installed

clean:
	rm -rf $(VENV) $(EXTERNAL) .workbench build dist
