# `make help` lists the targets and the variables that change them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
NPROC ?= $(if $(filter 0,$(GPUS)),2,$(GPUS))
WORKERS ?= 2
TORCH ?= 2.11
ARGS ?=
VENV_ARGS ?=
PIP_ARGS ?=
# With a GPU, torch is resolved within pyproject's range and not pinned: which build fits is the driver's business.
CONSTRAINTS ?= constraints/$(if $(filter 0,$(GPUS)),cpu,common).txt

BIN := $(VENV)/bin
STAMP := $(VENV)/.aotdist-setup
# One process and its OpenMP team a core; more teams than cores cost a two-rank step half its speed.
RANK_THREADS := $(shell echo $$(( $(CORES) / $(NPROC) > 0 ? $(CORES) / $(NPROC) : 1 )))
FLOAT8_RECIPES := delayed blockwise tensorwise rowwise rowwise_with_gw_hp
FLOAT8_RUNS ?= runs/float8
# Hundreds of test processes import the package; where no bytecode is kept, each compiles all of it, for 1.3 s.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help setup train float8-curves test test-all test-other-torch test-device browser bench bench-gpu models zoo ranks kernels check house format docs clean

help: ## Show this list
	@echo "usage: make TARGET [VARIABLE=value ...]"; echo
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)$$/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18; echo
	@echo "  PYTHON=$(PYTHON)  VENV=$(VENV)  CONSTRAINTS=$(CONSTRAINTS)  NPROC=$(NPROC)  WORKERS=$(WORKERS)  TORCH=$(TORCH)"
	@echo "  ARGS='...' goes to train, test, bench, bench-gpu, models, zoo, ranks and kernels; PIP_ARGS='...' to pip; VENV_ARGS='...' to python -m venv"

setup: $(STAMP) ## Create .venv and install aotdist in it, editable, with the train, fp8, triton, validate, docs and dev extras

$(STAMP): pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[train,fp8,triton,validate,docs,dev]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -V >/dev/null 2>&1 || { echo "error: \`$(PYTHON)\` does not run; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: aotdist needs Python 3.11 or newer, \`$(PYTHON)\` is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)

train: $(STAMP) ## Train the example model on NPROC ranks; ARGS="--help" lists its options
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(RANK_THREADS)} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m aotdist.launch.train $(ARGS)

float8-curves: $(STAMP) ## Train in bf16 and with every FP8 recipe (runs that are there are kept), and draw docs/float8.svg
	for recipe in off $(FLOAT8_RECIPES); do \
	  name=$${recipe/off/bf16}; [[ -d $(FLOAT8_RUNS)/$$name ]] || OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(RANK_THREADS)} \
	    $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m aotdist.launch.train --float8.recipe $$recipe \
	    --parallel.precision bf16 --compile.backend fx --optim.steps 200 --run.log-every 20 \
	    --run.folder $(FLOAT8_RUNS) --run.name $$name $(ARGS); \
	done
	$(BIN)/python -m aotdist.launch.curve docs/float8.svg $(FLOAT8_RUNS)/bf16 $(FLOAT8_RECIPES:%=$(FLOAT8_RUNS)/%)

test: $(STAMP) ## Run the tests, all but the sweeps; ARGS="-k bucket" chooses some
	$(PYTEST) $(ARGS)

test-all: $(STAMP) ## Run the tests and the long sweeps
	$(PYTEST) -m "sweep or not sweep" --hypothesis-profile sweep $(ARGS)

test-device: $(STAMP) ## Run the tests that need a GPU; they are skipped, with that reason, where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v tests/device tests/launch/test_profiling.py -m "device and not sweep" $(ARGS)

first-contact: $(STAMP) ## Check every launcher, recipe and kernel on the GPU that is here; ARGS="--dry-run" on a CPU
	$(BIN)/python -m benchmarks.gpu.first_contact $(ARGS)

test-other-torch: ## Run the single-process tests on TORCH, 2.11 or 2.14, or say why it can't be installed
	.ci/other-torch $(TORCH) $(ARGS)

browser: $(STAMP) ## Install a Chromium for the tests of the report's page, or say why it can't be installed
	VENV=$(VENV) .ci/browser

bench: $(STAMP) ## Measure against the peers; writes JSON and a markdown table
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-gpu: $(STAMP) ## Measure on a GPU beside torch.compile and Liger, in under nine minutes; needs one
	-$(if $(filter 0,$(GPUS)),,$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[bench-gpu]')
	$(BIN)/python -m benchmarks.gpu $(ARGS)

models: $(STAMP) ## Train real models in each layout and precision; ARGS="--families Llama" fills some cells anew
	$(BIN)/python -m benchmarks.zoo.run $(ARGS)

zoo: $(STAMP) ## Train forty architectures, and have them generate; ARGS="--models LlamaForCausalLM" runs some anew
	$(BIN)/python -m benchmarks.architectures.run $(ARGS)

ranks: $(STAMP) ## Have ranks differ in ninety ways, beside eager; ARGS="--scenarios killed barrier" runs some anew
	$(BIN)/python -m benchmarks.ranks.run $(ARGS)

kernels: $(STAMP) ## Compile the kernels of real models for a GPU that need not be there; writes a markdown table
	$(BIN)/python -m benchmarks.kernels $(ARGS)

check: $(STAMP) ## Lint, formatting, types, the direction of imports, and how large the package is
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.house.count

house: $(STAMP) ## Count lines, classes, files and floors of the package, beside their limits and goals
	$(BIN)/python -m tests.house.count

format: $(STAMP) ## Fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP) ## Build the site into build/docs, and write anew the pages that programs write (docs/*.py)
	for page in semantics emitter extremes troubleshooting; do $(BIN)/python docs/$$page.py > docs/$$page.md.new && mv docs/$$page.md.new docs/$$page.md; done
	@# The theme warns of mkdocs 2, which pyproject.toml keeps out.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove everything that was built or cached, but not the virtual environments or runs/
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name .venv\* -prune -o -name __pycache__ -type d -exec rm -rf {} +
