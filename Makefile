# The one entry for people and for CI. Each target makes the virtual environment that it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
export OMP_NUM_THREADS ?= 1
SGLANG_VENV ?= .venv-sglang
SGLANG_ENV = ROLLOUT_SGLANG__PYTHON=$(abspath $(SGLANG_VENV)/bin/python) ROLLOUT_SGLANG__PLATFORM=cpu

.DEFAULT_GOAL := help
.PHONY: help install demo demo-sglang real-data test test-fast test-gpu test-sglang test-compose wheels check format bench policy clean

help:             ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.runtime  ## what the services need, into .venv; the other targets do it, too

demo: $(VENV)/.runtime  ## train the tiny policy on this machine; DEMO_ARGS="--steps 20 --seed 1"
	@$(BIN)/python -m services.cli demo $(DEMO_ARGS)

real-data: $(VENV)/.runtime  ## two steps on DAPO prompts and AIME-2024; needs DATA_ROOT
	@$(BIN)/python -m services.cli demo --job configs/real-data.toml $(DEMO_ARGS)

test: $(VENV)/.dev  ## all tests of this machine
	$(BIN)/python -m pytest -q $(TEST_ARGS)

test-gpu: $(VENV)/.dev  ## the tests that need a GPU; figures to benchmarks/results/gpu.json
	$(BIN)/python -m tests.gpu.run $(TEST_ARGS)

test-fast: $(VENV)/.dev  ## without the end-to-end runs
	$(BIN)/python -m pytest -q -m "not slow" $(TEST_ARGS)

test-sglang: $(VENV)/.dev $(SGLANG_VENV)/.installed  ## with a real SGLang server on this CPU
	$(SGLANG_ENV) $(BIN)/python -m pytest -q tests/sglang $(TEST_ARGS)

test-compose: $(VENV)/.dev wheels  ## the stack in containers; needs a Docker engine
	$(BIN)/python -m pytest -q tests/unit/test_compose_files.py tests/compose $(TEST_ARGS)

wheels: $(VENV)/bin/python  ## torch's CPU build for the images' Python 3.11, where pip finds it
	@ls docker/wheels/torch-*.whl >/dev/null 2>&1 || \
	  $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
	    --only-binary=:all: --python-version 3.11 -c requirements/constraints.txt -d docker/wheels torch

demo-sglang: $(VENV)/.runtime $(SGLANG_VENV)/.installed  ## a small demo job sampled by SGLang
	@$(SGLANG_ENV) $(BIN)/python -m services.cli demo --job configs/demo-sglang.toml $(DEMO_ARGS)

check: $(VENV)/.dev  ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

policy: $(VENV)/.runtime  ## make assets/tiny-dsv4 anew (minutes)
	$(BIN)/python -m scripts.make_tiny_policy

clean:            ## remove the environment, runs and caches
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Tandem needs Python 3.11 or newer; %s is %s. Try make install PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@echo "making $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements/grading.txt requirements/services.txt requirements/trainer.txt requirements/megatron.txt requirements/constraints.txt | $(VENV)/bin/python
	@echo "installing what the services need into $(VENV) (once, a few minutes)"
	@$(PIP) -r requirements/services.txt -r requirements/trainer.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r requirements/megatron.txt
	@touch $@

$(SGLANG_VENV)/.installed: requirements/sglang-cpu.txt requirements/sglang-cpu-no-deps.txt requirements/sglang-fork.txt
	@echo "installing SGLang for the CPU into $(SGLANG_VENV) (once, a few minutes, 2.5 GB)"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/sglang-cpu.txt
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sglang-cpu-no-deps.txt
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SGLANG_VENV)/fork -r requirements/sglang-fork.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/tracking.txt $(VENV)/.runtime
	@echo "installing what the tests need into $(VENV) (once)"
	@$(PIP) -r requirements/dev.txt -r requirements/tracking.txt
	@touch $@
