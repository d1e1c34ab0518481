# The two commands of the README, and what developers use. Everything is installed into .venv.

PYTHON ?= python3
RANKS  ?= 2
ARGS   ?=
BIN    := .venv/bin
# A bar where somebody is watching: mpirun's output is a pipe even on a terminal.
PROGRESS := $(shell [ -t 1 ] && echo live || echo plain)
export COLUMNS ?= $(shell [ -t 1 ] && tput cols 2>/dev/null || echo 100)

.PHONY: train test lint format bench clean

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

clean: ## remove environments and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/%: extras = $(patsubst train,mpich,$(patsubst test,mpich$(,)test,$*))
, := ,
.venv/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(extras)]'
	touch $@
