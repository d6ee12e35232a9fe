# Everything a newcomer types. A fresh machine needs python3 (3.11 to 3.13), make and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
LOCK := requirements/py$(subst .,,$(basename $(TAG))).txt
TEST_LOCK := requirements/test-py$(subst .,,$(basename $(TAG))).txt
# The version is part of the name: another interpreter makes the environment anew. First what runs, then what checks.
INSTALLED := $(VENV)/.installed-$(TAG)
TOOLS := $(VENV)/.tools-$(TAG)
# What the tests compare with: PyTorch, on the one Python for which a release is pinned. Elsewhere they say so.
TORCH_LOCK := $(wildcard requirements/torch-py$(subst .,,$(basename $(TAG))).txt)
TESTABLE := $(VENV)/.testable-$(TAG)
SITE := $(VENV)/.site-$(TAG)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SOURCES := src tests benchmarks examples docs/site
# One worker more than cores, for tests wait for what they start; and 4 GiB of memory for each.
WORKERS := $(shell $(PYTHON) -c 'import os; m = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"); \
	print(max(1, min(os.cpu_count() + 1, m >> 32)))')

.PHONY: help demo demo-weigh test test-rooms test-torch test-evidence test-again test-wide test-long lint types contract check docs lock clean

help:
	@echo 'make demo       set up what runs, weigh llama3-8b for 8 H100, train a small Transformer, compare (ten minutes)'
	@echo 'make demo-weigh only the weighing of it'
	@echo 'make test       set up and run the tests of the core, of README and of docs'
	@echo 'make test-rooms the tests of the rooms outside the core (contrib), but those of the next line'
	@echo 'make test-torch what is compared with PyTorch: its modules, eager and as JAX programs, weights of Hugging Face'
	@echo 'make test-evidence the tests of benchmarks/, of its records and of the pages that are made of them'
	@echo 'make test-again what may differ on another Python or jax: one case of each test, with annotations checked'
	@echo 'make test-wide  the wider tests: more layouts, every chip, a fuzz of the command line'
	@echo 'make test-long  the tests that take minutes each; leaves a record in benchmarks/records'
	@echo 'make lint       ruff: rules and format; no module above 700 lines, no function above 60'
	@echo 'make types      pyright, strict where jax is not imported'
	@echo 'make contract   which package may import which'
	@echo 'make check      hold the main presets to the budgets in meshwright.toml'
	@echo 'make docs       the site of docs/, with every link checked, in build/site'
	@echo 'make lock       renew requirements/*py3*.txt, but those of torch, from pyproject.toml'
	@echo 'make clean      remove the environment and everything that tools leave behind'
	@echo 'With another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12'

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

demo-weigh: $(INSTALLED)
	$(BIN)/python examples/demo.py --weigh

# Free workers take tests from the end of another's list; a file's tests mostly stay together and share fixtures.
TEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30
EVERY_TIME := not wide and not long and not gpu
OF_TORCH := $(wildcard tests/contrib/torch*) tests/contrib/huggingface $(wildcard src/meshwright/contrib/*torch*)
OF_ROOMS := $(filter-out %__pycache__ $(OF_TORCH),$(wildcard tests/contrib/* src/meshwright/contrib/*))

test: $(TESTABLE)
	$(TEST) -m '$(EVERY_TIME)' $(addprefix --ignore=,tests/benchmarks tests/contrib src/meshwright/contrib)

test-rooms: $(TESTABLE)
	$(TEST) -m '$(EVERY_TIME)' $(OF_ROOMS)

test-torch: $(TESTABLE)
	$(TEST) -m '$(EVERY_TIME)' $(OF_TORCH)

test-evidence: $(TESTABLE)
	$(TEST) -m '$(EVERY_TIME)' tests/benchmarks

test-again: $(TESTABLE)
	$(TEST) -p tests.typed -m '$(EVERY_TIME) and not once and not further' --ignore=tests/benchmarks

test-wide: $(TESTABLE)
	$(TEST) -m 'wide and not long and not gpu'

test-long: $(TESTABLE)
	$(BIN)/python benchmarks/long_tests.py

lint: $(TOOLS)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/python benchmarks/size.py --check

types: $(TESTABLE)
	$(BIN)/pyright --pythonpath $(BIN)/python

contract: $(TOOLS)
	$(BIN)/lint-imports

check: $(INSTALLED)
	$(BIN)/python -m meshwright check

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Without hashes: an index may serve its own builds of the same versions. What runs has the versions that are tested.
COMPILE = $(BIN)/uv pip compile --quiet --upgrade --python-version $$version --no-emit-index-url --no-header \
	--python-platform x86_64-unknown-linux-gnu --extra nvidia --extra train --extra check --extra watch --extra in-place
lock: $(INSTALLED)
	$(PIP) install --quiet uv
	for version in 3.11 3.12 3.13; do \
		tag=py$$(echo $$version | tr -d .).txt; \
		$(COMPILE) --extra dev --extra programs pyproject.toml --output-file requirements/test-$$tag || exit 1; \
		$(COMPILE) --constraint requirements/test-$$tag pyproject.toml --output-file requirements/$$tag || exit 1; \
	done
	version=3.11; $(COMPILE) --no-annotate --extra docs --constraint requirements/test-py311.txt \
		--constraint requirements/torch-py311.txt pyproject.toml | grep -vxFf requirements/py311.txt >requirements/docs.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -exec rm -rf {} +

# An environment that was made by hand with the same interpreter is kept and brought to the lock.
$(INSTALLED): $(LOCK) pyproject.toml
	@if [ "$$($(BIN)/python -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" != "$(TAG)" ]; \
	then echo 'Making $(VENV) with Python $(TAG).'; $(PYTHON) -m venv --clear $(VENV); fi
	@echo 'Installing into $(VENV): 0.34 GB to download, 1.3 GB on disk, once. Unpacking at the end takes a silent minute.'
	$(PIP) install --no-deps --requirement $(LOCK)
	$(PIP) install --no-deps --no-build-isolation --editable .
	$(PIP) check
	@touch $@

$(TOOLS): $(INSTALLED) $(TEST_LOCK)
	@echo 'Installing what checks and tests: 0.16 GB to download, 0.8 GB on disk, once.'
	$(PIP) install --no-deps --requirement $(TEST_LOCK)
	$(PIP) check
	@touch $@

# With its dependencies: the build of PyTorch that pip finds may ask for packages of its own.
$(TESTABLE): $(TOOLS) $(TORCH_LOCK)
ifneq ($(TORCH_LOCK),)
	@echo 'Installing PyTorch to compare with: 0.2 GB if pip finds a CPU build, else 3 GB with its CUDA packages.'
	$(PIP) install --requirement $(TORCH_LOCK)
	$(PIP) check
endif
	@touch $@

$(SITE): $(INSTALLED) requirements/docs.txt
	@echo 'Installing what makes the site: 40 MB to download, once.'
	$(PIP) install --no-deps --requirement requirements/docs.txt
	$(PIP) check
	@touch $@

# Reached only where no such lock is in the repository.
$(LOCK):
	@echo "Meshwright needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is '$(TAG)'." >&2
	@echo "Name another interpreter: make PYTHON=python3.12 test" >&2
	@exit 2
