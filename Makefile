# make demo | test | test-engines | test-all | test-xla | torture | mutants | check | check-oldest | check-newest | check-wheel | bench | docs | format | clean.
# Needs git, make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV := .venv
XLA := .venv-xla
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The oldest torch that pyproject.toml allows, and a torchao for it; the other packages are those of constraints.txt.
OLDEST_TORCH := 2.9.0
OLDEST_TORCHAO := 0.17.0
# The newest torch that was tested, and a torchao for it.
NEWEST_TORCH := 2.14.1
NEWEST_TORCHAO := 0.18.0
VENV_DEMO := .venv-demo
STAMP_DEMO := $(VENV_DEMO)/.installed
STAMP_DOCS := $(VENV_DEMO)/.docs-installed
# The packages of $(VENV), and libraries on Lightning that need other versions of some of them.
VENV_ECOSYSTEM := .venv-ecosystem
VENV_OLDEST := .venv-oldest
VENV_NEWEST := .venv-newest
# Two workers, each with one file at a time, so that the tests of a file share their fixtures.
SUITE := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Whole programs are among the slow tests: make check does not even import their files.
PROGRAMS := tests/ported tests/requirements
FAST := -m pytest -q -n 2 -m "not (slow or distributed or engines or exhaustive or torture)" $(PROGRAMS:%=--ignore=%)
OPERATIONS := $(BIN)/python tests/helpers/compile_deepspeed.py

# Where deepspeed finds ninja and stores the operations that it compiles. With ccache installed, their object files are
# cached in the user's home, and a second clone does not compile again: paths are hashed relative to the clone.
export PATH := $(CURDIR)/$(BIN):$(if $(wildcard /usr/lib/ccache/c++),/usr/lib/ccache:)$(PATH)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
# Tests start hundreds of processes: without bytecode each would compile every source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-engines test-all test-xla torture mutants check check-oldest check-newest check-wheel lint bench docs pictures format clean

help:
	@echo "make demo     a digits classifier from an empty folder to a report of its training (two minutes)"
	@echo "make check    format, lint, types, architecture, fast tests (two minutes)"
	@echo "make check-oldest  the fast tests on the oldest supported torch, in an environment of its own"
	@echo "make check-newest  the same on the newest torch that was tested"
	@echo "make test     the fast tests, and every feature of the core in real processes (seven minutes)"
	@echo "make test-engines  DeepSpeed's compiled optimizer, Megatron, Ray, Slurm, MPI, two hosts, trackers, S3, browsers; libraries on Lightning, in .venv-ecosystem"
	@echo "make test-all every test, with all combinations, sizes and repetitions"
	@echo "make test-xla the tests of XLA, in an environment of 7 GB with torch_xla and its torch (ten minutes)"
	@echo "make torture  hundreds of kills of running trainings, thousands of damaged files (some minutes)"
	@echo "make mutants  a hundred mistakes in the package, and which of them make test does not notice (an hour)"
	@echo "make bench    the benchmarks"
	@echo "make docs     the documentation as a site in build/site, with the API reference (three minutes)"
	@echo "make pictures the pictures of README.md and of the documentation's start page, with chromium"
	@echo "make format   rewrite the sources in the house format"
	@echo "make clean    remove what the other targets made (the environments stay)"

venv: $(STAMP)

# torch first and under constraints: left to the resolver's order, another package may pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Trainwright needs Python 3.11 or newer; %s is %d.%d. Run: make PYTHON=python3.11 ..." % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# The demo has an environment of its own, with the few packages that it needs.
demo: $(STAMP_DEMO)
	rm -rf demo
	$(VENV_DEMO)/bin/trainwright new demo/digits --template classifier
	cd demo/digits && ../../$(VENV_DEMO)/bin/python train.py
	@$(VENV_DEMO)/bin/trainwright report demo/digits/runs --output demo/digits/report.html > /dev/null
	@echo
	@$(VENV_DEMO)/bin/python tests/helpers/demo_report.py demo/digits

$(STAMP_DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_DEMO)
	$(VENV_DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV_DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	@touch $@

test: $(STAMP)
	$(SUITE) -m "not (engines or exhaustive or torture)"

test-engines: $(STAMP) $(VENV_ECOSYSTEM)/.installed
	$(OPERATIONS) CPUAdamBuilder
	$(SUITE) -m "engines and not (exhaustive or torture)"

test-all: $(STAMP) $(VENV_ECOSYSTEM)/.installed
	$(OPERATIONS) CPUAdamBuilder AsyncIOBuilder
	$(SUITE) -m "not torture"

# Python reads the packages of $(VENV) after those of this environment.
$(VENV_ECOSYSTEM)/.installed: PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(VENV_ECOSYSTEM)/.installed: $(STAMP) pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" \
		> "$$($(@D)/bin/python $(PURELIB))/base.pth"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ecosystem]"
	@touch $@

# torch_xla fits one version of torch only, so it has an environment of its own (7 GB).
$(XLA)/.installed: pyproject.toml
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.9.0 torch_xla==2.9.0
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check -e . hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

test-xla: $(XLA)/.installed
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest -q -n 2 tests/strategies/xla

torture: $(STAMP)
	$(BIN)/python -m pytest -m torture tests/torture

# Which tests run which lines is recorded first (build/mutants): remove it when the tests have changed.
mutants: $(STAMP)
	test -f build/mutants/coverage || $(BIN)/python -m tests.mutants.record
	$(BIN)/python -m tests.mutants.run

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p trainwright

check: lint
	$(BIN)/python $(FAST)

# The fast tests on another torch, in an environment of its own. They compile no operation of deepspeed. The environment's
# own tools (ninja) come before those of $(VENV).
check-oldest: VENV_OTHER := $(VENV_OLDEST)
check-newest: VENV_OTHER := $(VENV_NEWEST)
check-oldest: $(VENV_OLDEST)/.installed
check-newest: $(VENV_NEWEST)/.installed
check-oldest check-newest:
	PATH="$(CURDIR)/$(VENV_OTHER)/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VENV_OTHER)/torch_extensions" \
		$(VENV_OTHER)/bin/python $(FAST)

$(VENV_OLDEST)/.installed: OTHER_VERSIONS := s/^torch==.*/torch==$(OLDEST_TORCH)/; s/^torchao==.*/torchao==$(OLDEST_TORCHAO)/
$(VENV_NEWEST)/.installed: OTHER_VERSIONS := s/^torch==.*/torch==$(NEWEST_TORCH)/; s/^torchao==.*/torchao==$(NEWEST_TORCHAO)/
$(VENV_OLDEST)/.installed $(VENV_NEWEST)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(@D)
	sed '$(OTHER_VERSIONS)' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e ".[dev]"
	@touch $@

# The wheel, without its extras, in an empty environment: README.md's example trains, logs to CSV and shows a bar.
check-wheel:
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt scikit-learn build/wheel/trainwright-*.whl
	build/wheel/venv/bin/python tests/helpers/wheel_example.py build/wheel/example

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	$(BIN)/python -m benchmarks

# The documentation is built in the demo's environment, with a few more packages.
docs: $(STAMP_DOCS)
	$(VENV_DEMO)/bin/python -m docs.site.build

# The pictures of README.md and of the start page; needs chromium.
pictures: $(STAMP_DOCS)
	$(VENV_DEMO)/bin/python -m docs.site.pictures

$(STAMP_DOCS): $(STAMP_DEMO)
	$(VENV_DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,docs]"
	@touch $@

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf demo build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +
