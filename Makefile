# Every target sets itself up: `make demo` and `make test` work from a clean clone with Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := 0.13.7
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo test test-all check docs format lock reliability clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## a virtual environment with the locked versions

$(READY): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "holdfast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(BIN)/uv --version 2>/dev/null | grep -q '^uv $(UV)' || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

demo: $(READY)  ## forgetting and its cure, on embedded data, in under two minutes
	$(BIN)/holdfast demo

check: $(READY)  ## lint, format, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/imports.py

docs: $(READY)  ## the documentation as a site, in site/; every link is checked
	$(BIN)/python tools/docs.py site

test: check  ## checks and the default tests (under 10 minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: check  ## everything, the slow tests too
	$(BIN)/python -m pytest -n auto --dist worksteal

lock: $(READY)  ## renew requirements.lock from pyproject.toml: exact versions and hashes, no addresses
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev pyproject.toml \
	  --no-header --no-annotate --no-emit-index-url --generate-hashes -o requirements.lock

reliability: $(READY)  ## what is tried how often: signals, faults, bad inputs, hostile archives, addresses
	$(BIN)/python tools/reliability.py

format: $(READY)  ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make made
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
