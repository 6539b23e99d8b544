# make demo | test | slow | torture | check | bench | format | clean. Needs git, make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Whole programs are among the slow ones: not even their files are read here.
PROGRAMS := tests/outside_trials tests/ported tests/requirements
FAST := -n 2 -m "not slow and not distributed and not torture" $(PROGRAMS:%=--ignore=%)
SLOW := (slow or distributed) and not torture
# Side by side, since they wait for processes to start more than they compute; a file's tests share what it has made.
SLOWLY := $(PYTEST) -n 2 --dist loadfile -m "$(SLOW)"

# Where deepspeed finds ninja, and keeps what it compiles.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
# Tests start hundreds of processes: without bytecode each would compile every source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test slow torture check bench format clean

help:
	@echo "make demo    a digits classifier from an empty folder to a trained checkpoint"
	@echo "make test    the whole test suite"
	@echo "make slow    the half of make test that make check leaves out"
	@echo "make torture hundreds of kills of running trainings, thousands of damaged files (some minutes)"
	@echo "make check   format, lint, types, architecture, fast tests (two minutes)"
	@echo "make bench   the benchmarks"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove what the other targets made (the environment stays)"

venv: $(STAMP)

# torch first and under constraints: left to the resolver's order, another package may pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Trainwright needs Python 3.11 or newer; %s is %d.%d. Run: make PYTHON=python3.11 ..." % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	rm -rf demo
	$(BIN)/trainwright new demo/digits --template classifier
	cd demo/digits && ../../$(BIN)/python train.py
	@echo
	@$(BIN)/python tests/helpers/demo_report.py demo/digits

# Both halves always run, and the target fails if either did. What deepspeed compiles is compiled once, before them.
test: $(STAMP)
	$(BIN)/python tests/helpers/compile_deepspeed.py
	@status=0; \
	$(PYTEST) $(FAST) || status=$$?; \
	$(SLOWLY) || status=$$?; \
	exit $$status

slow: $(STAMP)
	$(BIN)/python tests/helpers/compile_deepspeed.py
	$(SLOWLY)

torture: $(STAMP)
	$(PYTEST) -m torture tests/torture

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p trainwright
	$(PYTEST) -q $(FAST)

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	$(BIN)/python -m benchmarks

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf demo build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
