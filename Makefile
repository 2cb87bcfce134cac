# Each target brings up the environment it needs (VENV; remade only when pyproject.toml or a setting
# changes) and runs in it. Settings: JAX=newest|oldest|VERSION, PYTHON=/path, INSTALLER=uv|pip,
# WORKERS=n, ARGS="more pytest arguments".
VENV ?= .venv
# The environment that compiles for GPUs, apart from the others: a CUDA plugin in one changes what
# JAX does there.
AHEAD ?= .venv-ahead
JAX ?= newest
WORKERS ?= 2
ARGS ?=
PYTEST = $(VENV)/bin/python -m pytest
# Processes, never threads: JAX's TPU interpreter is a singleton. worksteal keeps neighbouring
# tests, which share compiled kernels, on one worker.
PARALLEL = -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-slow test-gpu test-aot lint format env clean

help:
	@echo "make demo       fuse a kernel with its communication on this machine and check the result"
	@echo "make test       the test suite, without the tests marked slow"
	@echo "make test-slow  only the tests marked slow"
	@echo "make test-gpu   only the tests that need GPUs"
	@echo "make test-aot   compile every GPU kernel to machine code, without a GPU, within budgets"
	@echo "make lint       ruff, mypy, shellcheck, hadolint"
	@echo "make format     let ruff rewrite the sources"
	@echo "make clean      remove the environment and caches"
	@echo "Some tests: make test ARGS=tests/ops/test_auto.py; with more processes: WORKERS=8"

# The extras that each target needs; more of them are added to an environment that is there.
env: EXTRAS = test,dev,viz
demo: EXTRAS = viz
# Triton itself, without jax-triton's GPU part, interprets and compiles kernels on any machine.
test test-slow: EXTRAS = test,triton
test-gpu: EXTRAS = test,cuda13,triton
lint format: EXTRAS = test,dev
MAKE_ENV = @PYTHON="$(PYTHON)" INSTALLER="$(INSTALLER)" .ci/make_env "$(VENV)" "$(EXTRAS)" "$(JAX)"

env:
	$(MAKE_ENV)

demo:
	$(MAKE_ENV)
	$(VENV)/bin/python -m syncopate_jax demo

test:
	$(MAKE_ENV)
	$(PYTEST) $(PARALLEL) -m "not slow" $(ARGS)

test-slow:
	$(MAKE_ENV)
	$(PYTEST) $(PARALLEL) -m slow $(ARGS)

# One process: each would reserve most of the GPU's memory.
test-gpu:
	$(MAKE_ENV)
	JAX_PLATFORMS=cuda,cpu $(PYTEST) -m "gpu or multigpu" $(ARGS)

# On the oldest JAX, whatever JAX says: one release's compiler, so that budgets mean something.
test-aot:
	@PYTHON="$(PYTHON)" INSTALLER="$(INSTALLER)" .ci/make_env "$(AHEAD)" test oldest
	@INSTALLER="$(INSTALLER)" .ci/add_compiler "$(AHEAD)"
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(AHEAD)/bin/python -m pytest $(PARALLEL) tests/aot $(ARGS)

lint:
	$(MAKE_ENV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	.ci/typecheck "$(abspath $(VENV))/bin/mypy"
	$(VENV)/bin/shellcheck .ci/*
	$(VENV)/bin/hadolint Dockerfile

format:
	$(MAKE_ENV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf "$(VENV)" "$(AHEAD)" build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
