# make install | demo | test | soak | clean      (demo, test and soak install first when needed)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A machine without an NVIDIA driver gets PyTorch's CPU build, from PyTorch's own index where that
# can be reached and from pip's default sources otherwise.
HAS_GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH   := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: install demo test soak clean
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else f"Python {v[0]}.{v[1]} found, 3.10 to 3.13 needed: run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),)
	$(BIN)/pip install --quiet --no-deps --retries 0 --timeout 20 --index-url $(CPU_INDEX) "$(TORCH)" \
	  || $(BIN)/pip install --quiet --no-deps "$(TORCH)"
endif
	$(BIN)/pip install --quiet --editable '.[demo,test,lock]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh

test: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests

# Kills at random for 40 minutes or more; the tables that it prints are those of benchmarks/RESULTS.md.
soak: install
	PERVIT_SOAK=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -s -m soak tests/faults

clean:
	rm -rf $(VENV) demo runs logs *.egg-info
