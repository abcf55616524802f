# Each target does all of its own set-up; nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
DOCS := $(VENV)/.installed-docs

.PHONY: demo test test-all lint format docs bench clean

demo: $(DEMO)
	$(BIN)/blockhf demo

# Two workers of one thread each; more threads would only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "slow or not slow"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)
	$(BIN)/mkdocs build --quiet
	@echo "The pages are in site/."

# The libraries to compare with are optional: benchmarks/peers.txt.
bench: $(DEMO)
	$(BIN)/blockhf bench products --profile
	$(BIN)/blockhf bench step
	$(BIN)/blockhf bench memory

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[experiments]"
	touch $@

# The development extras hold those of the demo.
$(DEV): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ $(DEMO)

$(DOCS): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@
