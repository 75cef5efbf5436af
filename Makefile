# `make` lists the targets. All but clean install first when needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell grep ^torch== constraints.txt)
CPU_INDEX  := https://download.pytorch.org/whl/cpu
CU12_INDEX := https://download.pytorch.org/whl/cu126
DALI_BUILDS := nvidia-dali-cuda120 nvidia-dali-cuda130

# The build of PyTorch: CUDA=12, CUDA=13 or HAS_GPU=1 (the same as CUDA=13), or HAS_GPU= (CPU only). Default: the
# installed build; in a fresh clone CUDA 13 if there is an NVIDIA driver, else CPU only.
# A stamp file has its build's name, so that make notices a change of build: .installed-NAME when the installation is
# complete, .began-NAME before.
STAMPS := $(wildcard $(VENV)/.installed* $(VENV)/.began*)
ifeq ($(origin CUDA),command line)
BUILD := cuda$(CUDA)
else ifneq ($(origin HAS_GPU),undefined)
BUILD := $(if $(HAS_GPU),cuda13,cpu)
else ifneq ($(filter $(VENV)/.installed-%,$(STAMPS)),)
BUILD := $(patsubst $(VENV)/.installed-%,%,$(firstword $(filter $(VENV)/.installed-%,$(STAMPS))))
else
BUILD := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13,cpu)
endif
ifeq ($(filter $(BUILD),cpu cuda12 cuda13),)
$(error CUDA must be 12 or 13, got '$(CUDA)': run for example `make install CUDA=12`)
endif
STAMP  := $(VENV)/.installed-$(BUILD)
OTHERS := $(filter-out %-$(BUILD),$(STAMPS))

# Compiled modules are kept, whatever the environment says: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo lint check quick-tests test test-long test-benchmarks docs coverage soak gpu-check clean
help:     ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /make \1\t/p' Makefile

install: $(STAMP)   ## all packages, pinned, into .venv; HAS_GPU=1 on a login node without a GPU, CUDA=12 for old drivers

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else f"Python must be 3.10 to 3.13, got {v[0]}.{v[1]}: run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	touch $(VENV)/.began-$(BUILD) $(subst .installed,.began,$(OTHERS))
	rm -f $(VENV)/.installed*
	@# pip does not distinguish builds of one version: the other one must be removed first.
	$(if $(OTHERS),$(BIN)/pip uninstall --quiet --yes torch $(if $(findstring cuda12,$(OTHERS)),$(DALI_BUILDS)))
ifeq ($(BUILD),cpu)
	@# From PyTorch's own index if it can be reached, else from pip's default index.
	$(BIN)/pip install --quiet --no-deps --retries 0 --timeout 20 --index-url $(CPU_INDEX) "$(TORCH)" \
	  || $(BIN)/pip install --quiet --no-deps "$(TORCH)"
endif
ifeq ($(BUILD),cuda12)
	$(BIN)/pip install --quiet --constraint constraints.txt --extra-index-url $(CU12_INDEX) "$(TORCH)+cu126"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,test,lint,insight,cuda12]'
	@# Both builds of DALI install the same files. The one for CUDA 13, which the package requires, is removed.
	$(BIN)/pip uninstall --quiet --yes $(DALI_BUILDS)
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt nvidia-dali-cuda120
else
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,test,lint,insight]'
endif
	rm -f $(VENV)/.began*
	touch $@

# `make demo DEMO_OPTIONS="--steps 5"` is a short run.
demo: install   ## train and evaluate on handwritten digits, in a few minutes
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh $(DEMO_OPTIONS)

lint: install   ## ruff, mypy and the rules of import, as in pyproject.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: install   ## lint, and the tests that start no process and build no full-size model: an answer in a minute
	@$(MAKE) --no-print-directory -j2 lint quick-tests

# Two at a time; of slow tests those of a file in one process: they share fixtures. `pytest tests` runs one after the other.
PYTEST_IN_TWO := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2
quick-tests: install
	$(PYTEST_IN_TWO) --dist worksteal --override-ini addopts=--strict-markers -q tests --quick

test: install   ## all tests but the long ones and those of benchmarks/, in 12 minutes on two cores
	$(PYTEST_IN_TWO) --dist loadfile --no-loadscope-reorder -m "not long" tests --ignore=tests/benchmarks $(TEST_OPTIONS)

test-long: install   ## the long tests, which prove more of the same
	$(PYTEST_IN_TWO) --dist loadfile -m long tests --ignore=tests/benchmarks $(TEST_OPTIONS)

test-benchmarks: install   ## the tests of benchmarks/, which run them in miniature
	$(PYTEST_IN_TWO) --dist loadfile tests/benchmarks $(TEST_OPTIONS)

# Look at it with: python -m http.server --directory build/site --bind 127.0.0.1
docs: install   ## the documentation as a site, build/site/index.html
	$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2> /dev/null || $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# `make coverage TESTS=tests/test_files.py` runs a part of the tests.
TESTS ?= tests
coverage: install   ## how much of the code the tests run, in the processes that they start too; slower than test
	$(BIN)/coverage erase
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/coverage run -m pytest $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# It prints the tables of docs/results/recovery.md.
KILLS ?= 1000
soak: install   ## fault tests with random kills, 40 minutes; then KILLS=1000 more, hours, which the same command continues
	PERVIT_SOAK=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -s -m soak tests/faults
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=tests PERVIT_QUIET=1 $(BIN)/python -m faults.soak --folder build/soak --kills $(KILLS)

# With the Python of .venv, else with $(PYTHON): a machine without network has its own packages. docs/install.md
MINUTES ?= 25
gpu-check:   ## on a machine with CUDA GPUs: measurements and tests, 25 minutes or MINUTES=5, no network
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --output gpu-check.json --minutes $(MINUTES) $(GPU_OPTIONS)

clean:    ## remove generated files; runs/, data/ and logs stay
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .coverage .coverage.*
	find pipeline data_prep examples tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
