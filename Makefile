# Everything a person types. `make test` and `make demo` do all of their own set-up in .venv/.

.DEFAULT_GOAL := help
.PHONY: about help setup test test-all test-torch test-nullgpu test-machine lint format types docs packages notebooks demo bench gpu-suite dist clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := demo-output
# What `make dist` looks at a wheel with: build and twine here, and a clean environment for the wheel.
WHEELS := .venv-release
OUT ?= gpu-output
# Two processes of one compute thread each: the networks are small, and two threads would wait for each other.
PARALLEL := --numprocesses=2 --dist=worksteal
NOTEBOOKS := --nbmake --nbmake-timeout=900 notebooks
# The suite uses a machine's own torch with CUDA: LIBS names folders of what else is not installed there.
GPU_PYTHON ?= python3
# The first of these that is new enough; `make PYTHON=/path/to/python test` names another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# /tmp may be small, and in memory; torch's packages for CUDA take 3 GB.
INSTALL = mkdir -p $(VENV)/tmp && TMPDIR="$$PWD/$(VENV)/tmp" $(BIN)/python -m pip install --quiet

# What the caller's shell has set must change neither what is imported nor how many threads are used. Bytecode is kept:
# the suite starts some hundred processes, and each would compile all modules again.
unexport PYTHONPATH PYTHONHOME OMP_NUM_THREADS PYTHONDONTWRITEBYTECODE
export MPLBACKEND := Agg
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# All cases and all mutants: continuous integration. All seeds, all networks, long runs: before every release.
export POOCH_ALL ?= $(ALL)
export POOCH_DEEP ?= $(DEEP)

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install poochplan with everything it needs (again only when the pins change)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: expected Python 3.11 or newer, found $$(python3 --version 2>&1 || true);" \
			"install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: expected Python 3.11 or newer, found $$($(PYTHON) --version 2>&1) as PYTHON=$(PYTHON)" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version); the first time this downloads torch and takes some minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make a virtual environment with pip in it; install its venv and pip" \
			"packages (on Debian and Ubuntu: apt install python3-venv python3-pip)" >&2; exit 1; }
	@$(PYTHON) tests/packaging/ready.py install $(VENV)
	@$(INSTALL) --constraint constraints.txt --editable '.[dev]' || { \
		echo "error: pip could not install the packages of constraints.txt; its own message is above" >&2; exit 1; }
	@touch $@

about:
	@[ -z "$(PYTHON)" ] || $(PYTHON) tests/packaging/ready.py about $(VENV)

test: about setup  ## Check what is claimed, each claim once: lint, format, types, docs, tests (some five minutes)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint types docs
	POOCH_PART=first OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) tests
	@echo "make test: lint, types, docs and tests all passed."

test-all: test  ## That, and the rest: second device, packaging, stacks, notebooks (a quarter of an hour); ALL=1 all cases, DEEP=1 all seeds
	POOCH_PART=rest OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) $(NOTEBOOKS) tests
	@echo "make test-all: the rest of the tests and the notebooks passed too."

test-torch: $(VENV)-torch-$(VERSION)/.installed  ## Run the suite on another torch, in an environment of its own: VERSION=2.14.1 or newest
	OMP_NUM_THREADS=1 $(VENV)-torch-$(VERSION)/bin/python -m pytest $(PARALLEL) $(TORCH_ARGS) tests
	@echo "make test-torch: passed on torch $$($(VENV)-torch-$(VERSION)/bin/python -c 'import torch; print(torch.__version__)')."

# In the same environment: the registry's torch is a build for CUDA. tests/nullgpu/README.md says what this shows.
test-nullgpu: $(VENV)-torch-$(VERSION)/.installed  ## Run the GPU's tests on a CUDA runtime that is none, in that environment: VERSION=2.14.1
	NULLGPU_DEVICES=2 OMP_NUM_THREADS=1 $(VENV)-torch-$(VERSION)/bin/python -m tests.nullgpu \
		pytest -q $(TORCH_ARGS) tests/nullgpu $(filter-out tests/gpu/test_suite_dry_run.py,$(wildcard tests/gpu/test_*.py))
	NULLGPU_COPIED_BYTES=1048576 PYTHONPATH=src OMP_NUM_THREADS=1 $(VENV)-torch-$(VERSION)/bin/python -m tests.nullgpu \
		python -m benchmarks.gpu_suite --out $(OUT) --tiny --no-tests
	@echo "make test-nullgpu: passed; the suite's page is in $(OUT)."

# sympy and setuptools: torch pins its own. highspy, numpy and pandas: the newest, which nothing else here tries.
$(VENV)-torch-$(VERSION)/.installed: pyproject.toml constraints.txt
	@if [ -z "$(VERSION)" ]; then \
		echo "error: expected a version of torch, or newest: make test-torch VERSION=2.14.1" >&2; exit 1; fi
	$(PYTHON) -m venv --clear $(@D)
	grep -vE '^(torch|sympy|setuptools|highspy|numpy|pandas)==' constraints.txt > $(@D)/constraints.txt
	mkdir -p $(@D)/tmp
	TMPDIR="$$PWD/$(@D)/tmp" $(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt \
		'$(if $(filter newest,$(VERSION)),torch,torch==$(VERSION))' --editable '.[dev]'
	@touch $@

test-machine:  ## As root: `make test` in a root folder of another Debian, made for it: RELEASE=trixie; ORDINARY=1 as a user; BARE=1 without compiler, home, network
	@RELEASE="$(RELEASE)" tests/packaging/machine.sh

lint: setup  ## Check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Put style and formatting right where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## Check types (mypy)
	$(BIN)/mypy

docs: setup  ## Build the docs site into site/, without network; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

packages: setup  ## Write the package folders into pyproject.toml, after one has come or gone
	$(BIN)/python tests/packaging/folders.py

notebooks: setup  ## Execute the notebooks, and store what they show: on a quiet machine, for they show times
	OMP_NUM_THREADS=1 $(BIN)/pytest --overwrite $(NOTEBOOKS)

demo: setup  ## Profile, plan and run a 3D U-Net on a real MRI volume, a minute or two on 2 cores
	@mkdir -p $(DEMO)
	$(BIN)/pooch profile configs/demo.toml --throttle 400MB/s -o $(DEMO)/profile.json --force
	$(BIN)/pooch plan $(DEMO)/profile.json --budget 60% -o $(DEMO)/plan.json --force
	$(BIN)/pooch run configs/demo.toml --plan $(DEMO)/plan.json --check \
		--profile $(DEMO)/profile.json --timeline $(DEMO)/timeline.png --force

bench: setup  ## Plan the settings of earlier systems, simulated, beside what they published (some 20 minutes)
	$(BIN)/python -m benchmarks.sources -o benchmarks/results/sources.json

gpu-suite:  ## On a machine with a GPU: its tests and measurements into OUT=folder, under 10 minutes, nothing installed
	PYTHONPATH=src$(if $(LIBS),:$(LIBS)) $(GPU_PYTHON) -m benchmarks.gpu_suite --out $(OUT) $(GPU_ARGS)

dist: setup  ## Build sdist and wheel into dist/ and check them: twine, a clean environment, a plan
	rm -rf dist $(WHEELS)
	$(PYTHON) -m venv $(WHEELS)/tools && $(PYTHON) -m venv $(WHEELS)/clean
	$(WHEELS)/tools/bin/pip install --quiet --constraint constraints.txt 'build>=1.2' 'twine>=6.1' 'setuptools>=77'
	$(WHEELS)/tools/bin/python -m build --no-isolation --outdir dist .
	$(WHEELS)/tools/bin/python -m twine check --strict dist/*
	$(WHEELS)/clean/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd $(WHEELS) && clean/bin/pooch --version && \
		clean/bin/pooch plan '$(CURDIR)/benchmarks/instances/resnet50-b256-v100.json.gz' --budget 60% --policy greedy -o plan.json
	rm -rf $(WHEELS)
	@echo "make dist: $$(ls dist | tr '\n' ' ')passed."

clean:  ## Remove the environments, the demo's output, what was built and all caches
	rm -rf $(VENV) $(VENV)-torch-* $(WHEELS) $(DEMO) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
