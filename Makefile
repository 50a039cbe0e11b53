# Everything is set up in .venv on first use; only Python (3.11 or later) and make are needed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL ?= gpt2
HARDWARE ?= dgx-a100
GLOBAL_BATCH ?= 512
INPUTS ?= 100000
SEED ?= 1
PACKAGE ?= exchange
COUNT ?= 20
CPU_TORCH ?= 2.13.0+cpu
# In CI (CI=true) a part that tests need and that cannot be had is a failure; elsewhere its tests are skipped by name.
ifeq ($(CI),true)
TESTS_MAY_LACK := --may-lack backends,browser,checkouts,gpu,network,shared
BACKENDS_MAY_LACK := --may-lack checkouts,gpu,shared
endif
UNLESS_CI = [ "$(CI)" != true ] && echo

.PHONY: help plan torch test test-backends fuzz leaves mutants check format docs golden clean

help:
	@echo "make plan    run the main job on a bundled model and cluster, and show the result"
	@echo "make test    run all tests; those that run plans are skipped where the index has no torch for CPUs (0.2 GB);"
	@echo "             with CI=true the one for GPUs is installed then, and what cannot be run fails"
	@echo "make test-backends  run what is exported in JAX, transformers, DeepSpeed, Megatron and torch themselves, which it installs"
	@echo "make torch   install torch, the one for GPUs (3 GB) where there is no other"
	@echo "make fuzz    read 100,000 mutated files (INPUTS=..., SEED=...); prints how each fault is run again"
	@echo "make mutants PACKAGE=exchange  change one line at a time (COUNT=20, SEED=1) and see whether the package's own tests fail"
	@echo "make leaves  change every value of plans of all kinds, and list the changes that 'check' does not find (an hour)"
	@echo "make check   formatting, lint, types, layering"
	@echo "make format  rewrite the code as 'make check' wants it"
	@echo "make docs    rewrite what the pages of docs/ take from the package"
	@echo "make golden  rewrite what ten jobs decide, which .ci/pythons expects of every version of Python"

$(BIN)/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev,measure,sweep]"
	@touch $@

plan: $(BIN)/.ready
	$(BIN)/shardplan plan $(MODEL) --hardware $(HARDWARE) --global-batch $(GLOBAL_BATCH) -o $(MODEL).plan.json
	$(BIN)/shardplan explain $(MODEL).plan.json
	$(BIN)/shardplan simulate $(MODEL).plan.json

$(BIN)/.torch: $(BIN)/.ready torch-constraints.txt
	if $(PIP) --constraint torch-constraints.txt "torch==$(CPU_TORCH)" onnxscript; then touch $@; \
	elif [ "$(CI)" = true ]; then $(PIP) --constraint torch-constraints.txt torch onnxscript && touch $@; \
	else echo "no torch for CPUs in this index: tests that run plans are skipped ('make torch' installs the one for GPUs)"; fi

torch: $(BIN)/.torch
	$(PIP) --constraint torch-constraints.txt torch onnxscript
	@touch $(BIN)/.torch

test: $(BIN)/.torch
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS_MAY_LACK)

test-backends: torch
	$(PIP) jax transformers accelerate setuptools
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --constraint torch-constraints.txt deepspeed \
	|| { $(UNLESS_CI) "DeepSpeed cannot be installed: its tests are skipped"; }
	$(PIP) --no-deps megatron-core || { $(UNLESS_CI) "megatron-core cannot be installed: its tests are skipped"; }
	$(BIN)/python -m pytest -n 2 tests/backends $(BACKENDS_MAY_LACK)

fuzz: $(BIN)/.ready
	$(BIN)/python -m tests.fuzz --count $(INPUTS) --seed $(SEED)

mutants: $(BIN)/.ready
	$(BIN)/python -m tests.mutants $(PACKAGE) --count $(COUNT) --seed $(SEED)

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

golden: $(BIN)/.ready
	$(BIN)/python -m tests.decisions tests/decisions.json

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
