# Everything is set up in .venv on first use; only Python (3.11 or later) and make are needed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL ?= gpt2
HARDWARE ?= dgx-a100
GLOBAL_BATCH ?= 512
INPUTS ?= 100000
SEED ?= 1
CPU_TORCH ?= 2.13.0+cpu

.PHONY: help plan torch test test-backends fuzz leaves check format docs clean

help:
	@echo "make plan    run the main job on a bundled model and cluster, and show the result"
	@echo "make test    run all tests; those that run plans are skipped where the index has no torch for CPUs (0.2 GB)"
	@echo "make test-backends  run what is exported in JAX, transformers, DeepSpeed, Megatron and torch themselves, which it installs"
	@echo "make torch   install torch, the one for GPUs (3 GB) where there is no other"
	@echo "make fuzz    read 100,000 mutated files (INPUTS=..., SEED=...); prints how each fault is run again"
	@echo "make leaves  change every value of plans of all kinds, and list the changes that 'check' does not find (an hour)"
	@echo "make check   formatting, lint, types, layering"
	@echo "make format  rewrite the code as 'make check' wants it"
	@echo "make docs    rewrite what the pages of docs/ take from the package"

$(BIN)/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev,measure]"
	@touch $@

plan: $(BIN)/.ready
	$(BIN)/shardplan plan $(MODEL) --hardware $(HARDWARE) --global-batch $(GLOBAL_BATCH) -o $(MODEL).plan.json
	$(BIN)/shardplan explain $(MODEL).plan.json
	$(BIN)/shardplan simulate $(MODEL).plan.json

$(BIN)/.torch: $(BIN)/.ready torch-constraints.txt
	$(PIP) --constraint torch-constraints.txt "torch==$(CPU_TORCH)" onnxscript \
	|| echo "no torch for CPUs in this index: tests that run plans are skipped ('make torch' installs the one for GPUs)"
	@touch $@

torch: $(BIN)/.torch
	$(PIP) --constraint torch-constraints.txt torch onnxscript

test: $(BIN)/.torch
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-backends: torch
	$(PIP) jax transformers accelerate setuptools
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --constraint torch-constraints.txt deepspeed \
	|| echo "DeepSpeed cannot be installed: its tests are skipped"
	$(PIP) --no-deps megatron-core || echo "megatron-core cannot be installed: its tests are skipped"
	$(BIN)/python -m pytest -n 2 tests/backends

fuzz: $(BIN)/.ready
	$(BIN)/python -m tests.fuzz --count $(INPUTS) --seed $(SEED)

leaves: $(BIN)/.ready
	$(BIN)/python -m tests.leaves $(SHAPES)

check: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.budget

format: $(BIN)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(BIN)/.ready
	$(BIN)/python -m benchmarks.pages

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
