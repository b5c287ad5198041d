# Every target works on a fresh machine that has make and Python >= 3.10: each installs what it
# needs into .venv first. `make PYTHON=python3.12 ...` picks another interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
CONSTRAINTS := packaging/constraints.txt
# Python compiles what is imported; pip would compile everything, which takes a minute.
PIP := $(RUN) -m pip install --disable-pip-version-check -qq --no-compile
# Also where the environment says not to: each process would compile torch anew, in ten seconds.
export PYTHONDONTWRITEBYTECODE :=
NOX := $(RUN) -m nox --stop-on-first-error
# PyTorch's builds for the CPU have 0.2 GB. On Linux, PyPI's bring several GB of CUDA libraries.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ANSWERS := import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=3)
BENCH_JSON ?= benchmarks.json

.DEFAULT_GOAL := help
.PHONY: help dev demo quick test stress mutants lint types docs wheel clients bench gpu

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: $(VENV)/.dev ## Install torch, the package (editable) and all tools into .venv

demo: $(VENV)/.demo ## Train on handwritten digits at every level; print the table, write report.html
	$(RUN) -m apex compare examples/digits/experiment.py --steps 46

test: $(VENV)/.dev ## The whole check: lint, types, docs, then every test on the installed wheel
	@$(MAKE) --no-print-directory -j 2 types docs lint wheel
	@$(NOX) -s tests

quick: $(VENV)/.dev ## Lint, and the tests of parity and casts; under a minute
	@$(RUN) -m ruff check .
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 tests/parity tests/casts -m "not gpu and not distributed"

stress: $(VENV)/.dev ## Longer sweeps of the same tests, other libraries, other releases of torch
	@$(NOX) -s stress clients programs matrix

mutants: $(VENV)/.dev ## Plant faults in a copy of the sources; each must fail the test that names it
	@OMP_NUM_THREADS=1 $(RUN) -m tests.mutants

lint: $(VENV)/.dev ## Formatting, ruff rules, import directions
	@$(NOX) -s lint

types: $(VENV)/.dev ## mypy --strict
	@$(NOX) -s types

docs: $(VENV)/.dev ## Build docs/_build/html; any warning is an error
	@$(NOX) -s docs

wheel: $(VENV)/.dev ## Build the wheel and the sdist into dist/
	@$(NOX) -s wheel

clients: $(VENV)/.dev ## Train through the libraries that call apex, of today and of 2020 to 2025
	@$(NOX) -s clients programs

# The demo extra brings numpy, without which torch warns at import.
bench: $(VENV)/.demo ## Measure against torch.autocast; print the table, write benchmarks.json
	$(RUN) -m benchmarks --json $(BENCH_JSON)

# With the torch that PYTHON has: a pinned one would take the place of one built for the card.
gpu: ## On a machine with a GPU: tests, graphs, speed, memory, NCCL; ten minutes a call, goes on where it ended
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu

# Stamps: a step runs again when the file that decides its result is newer. torch comes first and
# alone, by its pin, so that nothing after it can choose another build.
$(VENV)/.torch: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@if test "$$(uname)" = Linux && ! test -e /proc/driver/nvidia && ! command -v nvidia-smi >/dev/null \
	  && timeout 5 $(PYTHON) -c '$(ANSWERS)' 2>/dev/null; then \
	  echo "Installing torch for the CPU into $(VENV), 0.2 GB ..."; more="--extra-index-url $(CPU_INDEX)"; \
	else \
	  echo "Installing torch into $(VENV); PyPI's build for Linux brings several GB of CUDA libraries ..."; \
	fi; $(PIP) $$more -r $(CONSTRAINTS)
	@touch $@

$(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "Installing apex-amp[$*] into $(VENV) ..."
	@$(PIP) -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@
