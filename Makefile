# Every target makes its own environment in .venv, once, and again when pyproject.toml changes.

VENV := .venv
BIN := $(VENV)/bin
# One more than there are processors, since tests wait for children, but no more than eight: each takes 1 GB.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))
KERNELS = $(shell find kernels_src tests miofind/torch -name '*.cu' -o -name '*.cuh' -o -name '*.cpp')

# The first Python that is new enough; choose another with `make PYTHON=/path/to/python ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)

# A machine without a GPU tests with PyTorch's build for CPUs: 190 MB, where the one for GPUs is ten times that.
CPU_TORCH = torch==2.13.0+cpu
CPU_TORCH_INDEX = https://download.pytorch.org/whl/cpu

GPU_DEMO = --batch 32 --dtype float16 --layout NHWC
CPU_DEMO = --batch 1

# The pip that comes with Python 3.11 compares each file of an index with hundreds of tags, which was half of installing.
QUICK_PIP = pip>=25

# Without its bytecode, every process that a test starts compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-compile gpu-test lint bytecode format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.run ## tune the layers of ResNet-50 on this machine and print what was found
	@[ -s $(VENV)/.extra ] && size="$(GPU_DEMO)" || size="$(CPU_DEMO)"; set -x; \
		$(BIN)/miofind tune --suite resnet50 --direction forward $$size

test: $(VENV)/.dev ## lint, types and the fast tests; needs no GPU
	@$(MAKE) --no-print-directory -j 2 lint bytecode
	$(BIN)/pytest -n $(JOBS) --dist worksteal

test-compile: $(VENV)/.dev ## every kernel for every architecture, and all that `make test` samples; needs no GPU
	$(BIN)/pytest -n $(JOBS) -m full_matrix

gpu-test: $(VENV)/.dev ## the tests that need an NVIDIA GPU
	@[ -s $(VENV)/.extra ] || { echo "make gpu-test needs an NVIDIA GPU and a driver for CUDA 12 or newer"; exit 3; }
	$(BIN)/pytest -m gpu

lint: $(VENV)/.dev ## ruff, clang-format and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(KERNELS)
	$(BIN)/mypy

# In a new clone every worker of pytest would compile all tests and what they import, 15 s of a processor's, at the same
# time as the others: once is enough, beside mypy, which keeps one processor busy. The tests tell what cannot be imported.
bytecode: $(VENV)/.dev
	@$(BIN)/pytest -qq --collect-only > /dev/null 2>&1 || true

format: $(VENV)/.dev ## write the code as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(KERNELS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "miofind needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python"; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: miofind needs Python 3.11 or newer"; exit 3; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make environments: on Debian and Ubuntu, install python3-venv"; exit 3; }
	@$(BIN)/python -m pip install -q --no-compile --retries 1 "$(QUICK_PIP)" || echo "Going on with the pip that came with Python."

$(VENV)/.extra: scripts/pick_extra.py | $(BIN)/python
	@extra=$$($(BIN)/python scripts/pick_extra.py) && printf %s "$$extra" > $@

# What a user installs.
$(VENV)/.run: pyproject.toml $(VENV)/.extra
	@echo "Installing into $(VENV); the first time takes a few minutes with a GPU."
	@extra=$$(cat $(VENV)/.extra); $(BIN)/python -m pip install -q -e ".$${extra:+[$$extra]}"
	@touch $@

# With the tools of the tests, and NVRTC where no CUDA extra brings it. Modules are compiled when they are imported: to
# compile all while installing takes a minute, for one module of three that tests import.
$(VENV)/.dev: pyproject.toml $(VENV)/.extra
	@echo "Installing into $(VENV), tools included; the first time takes a few minutes."
	@[ -s $(VENV)/.extra ] || $(BIN)/python -m pip install -q --no-compile --retries 1 "$(CPU_TORCH)" --extra-index-url $(CPU_TORCH_INDEX)
	@extra=$$(cat $(VENV)/.extra); $(BIN)/python -m pip install -q --no-compile -e ".[dev,$${extra:-compile}]"
	@touch $@
