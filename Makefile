# The two commands of the README, and what developers use. Everything is installed into .venv.

PYTHON ?= python3
RANKS  ?= 2
ARGS   ?=
BIN    := .venv/bin
# A bar where somebody is watching: mpirun's output is a pipe even on a terminal.
PROGRESS := $(if $(MAKE_TERMOUT),live,plain)
export COLUMNS ?= $(if $(MAKE_TERMOUT),$(shell tput cols 2>/dev/null),100)

.PHONY: train test lint format bench sample clean

train: .venv/train ## train a small model on two processes and let it write
	$(BIN)/mpirun -n $(RANKS) $(BIN)/distgpt train --stage mpi --progress $(PROGRESS) $(ARGS)

test: .venv/test ## run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/lint ## lint, format check and type check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/lint ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/train .venv-peer/done ## measure against PyTorch, in an environment of its own
	$(BIN)/python benchmarks/cpu.py --peer .venv-peer/bin/python $(ARGS)

sample: .venv/train ## make the bundled sample model anew
	rm -rf build/sample
	$(BIN)/distgpt train --config weights/sample.toml --out build/sample --progress $(PROGRESS)
	cp build/sample/weights.safetensors weights/sample.safetensors

clean: ## remove environments and caches
	rm -rf .venv .venv-peer .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/train: extras := mpich
.venv/test: extras := mpich,test
.venv/lint: extras := mpich,lint
.venv/train .venv/test .venv/lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(extras)]'
	touch $@

.venv-peer/done: benchmarks/requirements-peer.txt
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@
