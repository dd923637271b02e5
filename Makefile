# textmill: `make` prints what there is. Everything is installed into .venv, once.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A torch that is only bounded by a range may be the largest build there is: it is asked for exactly in every line.
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := -m pip install -qq --disable-pip-version-check --constraint constraints.txt $(TORCH)

# Scripts under bench/ that need no argument, no GPU and no peer of their own, and end in a few minutes; run the others by name.
BENCH ?= bench/batches.py bench/clean.py bench/near_duplicates.py bench/first_step.py bench/generate.py bench/decode_step.py \
	bench/kill_saves.py bench/save_stall.py

# Two workers of one thread each; a file goes to one worker, so that what it has started serves all its tests.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist loadfile \
	--no-loadscope-reorder --durations=10 -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint bench docs wheel clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/core ## train a small model on Shakespeare and let it write, in three minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh recipes/quickstart.sh

test: lint ## every capability once, in a few minutes (ARGS='-k name' chooses)
	@$(PYTEST) -m 'not long' $(ARGS)

test-long: $(VENV)/dev ## the other tests: kills, all layouts, servers, browser, recipes, fuzzing
	@$(PYTEST) -m long $(ARGS)

lint: $(VENV)/dev ## style, types, and who may import whom
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > $(VENV)/contracts.txt || { cat $(VENV)/contracts.txt; exit 1; }

bench: $(VENV)/dev ## the quick measurements under bench/
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: $(VENV)/docs ## the pages, into site/
	@$(BIN)/mkdocs build --strict --quiet --clean --site-dir site
	@echo "see site/index.html"

wheel: $(VENV)/dev ## a wheel in dist/, tried in an empty environment
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > $(VENV)/wheel.log 2>&1 || { cat $(VENV)/wheel.log; exit 1; }
	@try=$$(mktemp -d) && trap 'rm -rf "$$try"' EXIT && \
	echo "installing $$(ls dist/*.whl) into an empty environment" && \
	$(BIN)/python -m venv "$$try/venv" && \
	"$$try/venv/bin/python" $(PIP) dist/*.whl && \
	cd "$$try" && PATH="$$try/venv/bin:$$PATH" && \
	textmill --help > /dev/null && \
	textmill run quickstart train.steps=2 train.warmup=0
	@ls -l dist/*.whl

clean: ## remove what was built; .venv stays
	@rm -rf dist site build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find textmill tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says what .venv holds; it is made again when the project's needs change.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	echo "textmill needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no environment can be made; install Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/core: pyproject.toml constraints.txt textmill/__init__.py | $(VENV)/made
	@echo "installing textmill and what it needs into $(VENV) (a few minutes, once)"
	@$(BIN)/python $(PIP) hatchling
	@$(BIN)/python $(PIP) --no-build-isolation --editable .
	@touch $@

# DeepSpeed comes as source that asks the installed torch; its kernels are left to be compiled where they are used.
$(VENV)/dev: $(VENV)/core
	@echo "installing the tools for tests into $(VENV) (a minute or two, once)"
	@$(BIN)/python $(PIP) setuptools wheel
	@DS_BUILD_OPS=0 $(BIN)/python $(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/docs: $(VENV)/core
	@echo "installing mkdocs into $(VENV) (once)"
	@$(BIN)/python $(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@
