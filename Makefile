# textmill: `make` lists the targets. Everything is installed into .venv, once.

PYTHON ?= python3
ARGS ?=
COMMA := ,

VENV := .venv
BIN := $(VENV)/bin
# torch is pinned in every pip call: with a range only, pip may take a much larger build.
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := -m pip install --disable-pip-version-check --constraint constraints.txt $(TORCH)
PIP_LOG := $(VENV)/pip.log
# $(call install,PYTHON,PACKAGES): a terminal shows in one line what pip does; if it fails, all of its output is shown.
install = { $(1) $(PIP) $(2) 2>&1; echo "exit code $$?"; } | { \
	: > $(PIP_LOG); \
	while read -r word rest; do \
		echo "$$word $$rest" >> $(PIP_LOG); \
		case $$word in Collecting|Downloading|Building|Installing) \
			if [ -t 1 ]; then printf '\r\033[K  %.100s' "$$word $$rest"; fi ;; esac; \
	done; \
	if [ -t 1 ]; then printf '\r\033[K'; fi; \
	if [ "$$(tail -n 1 $(PIP_LOG))" != "exit code 0" ]; then cat $(PIP_LOG) >&2; exit 1; fi; }

# Benchmarks that need no argument, GPU or other program, and take a few minutes; run the others by name.
BENCH ?= bench/batches.py bench/clean.py bench/near_duplicates.py bench/first_step.py bench/generate.py \
	bench/decode_step.py bench/kill_saves.py bench/save_stall.py

# Two workers with one thread each; a file runs in one worker, so that its tests share the processes they start.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist loadfile \
	--no-loadscope-reorder --durations=10 -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint bench docs wheel clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/core ## train a small model on Shakespeare and generate text, in three minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh recipes/quickstart.sh

test: lint ## lint, then test every capability once, in a few minutes (ARGS='-k name' selects tests)
	@$(PYTEST) -m 'not long' $(ARGS)

test-long: $(VENV)/long ## run the other tests: kills, all layouts, servers, browser, recipes, fuzzing
	@$(PYTEST) -m long $(ARGS)

lint: $(VENV)/dev ## check style, types and import contracts
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > $(VENV)/contracts.txt || { cat $(VENV)/contracts.txt; exit 1; }

bench: $(VENV)/dev ## run the quick benchmarks of bench/
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: $(VENV)/docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean --site-dir site
	@echo "open site/index.html; search needs a server: $(BIN)/python -m http.server --directory site"

wheel: $(VENV)/dev ## build a wheel in dist/ and test it in an empty environment
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > $(VENV)/wheel.log 2>&1 || \
	{ cat $(VENV)/wheel.log; exit 1; }
	@try=$$(mktemp -d) && trap 'rm -rf "$$try"' EXIT && \
	echo "installing $$(ls dist/*.whl) into an empty environment" && \
	$(BIN)/python -m venv "$$try/venv" && \
	$(call install,"$$try/venv/bin/python",dist/*.whl) && \
	cd "$$try" && PATH="$$try/venv/bin:$$PATH" && \
	textmill --help > /dev/null && \
	textmill run quickstart train.steps=2 train.warmup=0
	@ls -l dist/*.whl

clean: ## remove build results and caches; keep .venv
	@rm -rf dist site build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find textmill tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files record what .venv contains; they are renewed when the dependencies change.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	echo "textmill needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	"use another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "cannot create the environment; install Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/core: pyproject.toml constraints.txt textmill/__init__.py | $(VENV)/made
	@echo "installing torch into $(VENV) (0.7 GB, once)"
	@$(call install,$(BIN)/python,hatchling)
	@echo "installing textmill and its other dependencies into $(VENV) (0.3 GB, once)"
	@$(call install,$(BIN)/python,--no-build-isolation --editable .)
	@touch $@

# DeepSpeed is built from source against the installed torch; its kernels are compiled when they are first used.
$(VENV)/dev: $(VENV)/core
	@echo "installing the test tools into $(VENV) (1.9 GB, once)"
	@$(call install,$(BIN)/python,setuptools wheel)
	@export DS_BUILD_OPS=0; $(call install,$(BIN)/python,--no-build-isolation --editable '.[dev]')
	@$(BIN)/python -m tests.support.mongo_process
	@touch $@

$(VENV)/long: $(VENV)/dev
	@echo "installing what only the long tests need into $(VENV) (0.5 GB, once)"
	@$(call install,$(BIN)/python,--no-build-isolation --editable '.[dev$(COMMA)long]')
	@touch $@

$(VENV)/docs: $(VENV)/core
	@echo "installing mkdocs and its theme into $(VENV) (once)"
	@$(call install,$(BIN)/python,--no-build-isolation --editable '.[docs]')
	@touch $@
