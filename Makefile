# octavo: `make serve` to talk to a model, `make test` to run the tests. Needs CPython 3.11+ with venv, make, a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch: serving on the CPU does not need it, the tests do (it is their oracle), Apple and NVIDIA GPUs do.
# TORCH=auto installs a CPU build where the index offers one, TORCH='torch==2.13.0' that requirement, TORCH=none nothing.
TORCH  ?= $(if $(filter serve install,$(or $(MAKECMDGOALS),serve)),none,auto)
MODEL  ?=
HOST   ?= 127.0.0.1
PORT   ?= 8000

# Some environments forbid bytecode files; then every process that a test starts would compile octavo anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-fast test-attack check format bench mutants guard guard-update install dev clean
.DEFAULT_GOAL := serve

serve: install
	$(BIN)/octavo serve $(MODEL) --host $(HOST) --port $(PORT)

install: $(VENV)/installed
dev: $(VENV)/installed-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "octavo needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch goes first: whatever is installed later finds it and does not pull a CUDA build.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h) | $(VENV)/bin/python
	PYTHON=$(BIN)/python TORCH='$(TORCH)' sh scripts/install-torch.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed scripts/dev-requirements.py
	PYTHON=$(BIN)/python TORCH='$(TORCH)' sh scripts/install-torch.sh
	$(BIN)/python scripts/dev-requirements.py > $(VENV)/dev-requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/dev-requirements.txt
	@touch $@

test: dev
	$(BIN)/pytest -q -m "not slow" -n auto
	$(BIN)/pytest -q -m slow

test-fast: dev
	$(BIN)/pytest -q -m "not slow" -n auto

# Minutes: hostile clients in full size, among well-behaved streams. `make test` has the short form.
test-attack: dev
	OCTAVO_ATTACK=long $(BIN)/pytest -q tests/attack

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py
	sh scripts/check-native.sh

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: dev
	$(BIN)/python benchmarks/benchmark.py --num-requests 5 --max-tokens 64

# Hours for all; MUTANTS='src/octavo/scheduler/policy.py' or '--sample 40 src/octavo/memory' for less. Not part of CI.
mutants: dev
	$(BIN)/python scripts/mutants.py $(MUTANTS)

# Instructions of the hot paths, by valgrind, against benchmarks/guard/instructions.json (docs/guard.md).
guard: dev
	$(BIN)/python benchmarks/guard/instruction_counts.py

guard-update: dev
	$(BIN)/python benchmarks/guard/instruction_counts.py --update

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
