# Two commands set all up on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 16 ] && echo $$n || echo 16)
EXTRAS := report,arena,index,dev$(if $(shell command -v nvidia-smi),$(shell echo ,gpu))

.PHONY: demo test lint bench index clean

demo: $(INSTALLED)  ## the main job: report on a real model in NVFP4 and MXFP4
	$(BIN)/nibblas report

test: $(INSTALLED)  ## all tests that this machine can run
# A thread for each worker: more would wait for each other. By name: slow files of few tests come early.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## time every kernel here against torch, and keep the evidence
	$(BIN)/nibblas bench

index: $(INSTALLED)  ## the index of nibblas's own kernels and evidence, served on this machine
	$(BIN)/nibblas index demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@
