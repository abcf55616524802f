# Each target does all of its own set-up; nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
DOCS := $(VENV)/.installed-docs

.PHONY: demo compare data test test-all test-integrations test-versions fuzz lint format docs bench clean

demo: $(DEMO)
	$(BIN)/blockhf demo

# The paper's figures on small networks, data included; a few minutes each.
compare: $(DEMO)
	$(BIN)/blockhf compare autoencoder
	$(BIN)/blockhf compare lstm
	$(BIN)/blockhf compare cnn

data: $(DEMO)
	$(BIN)/blockhf data fetch mnist cifar10

# Two workers of one thread each; more threads would only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "slow or not slow"

# Adapters with the trainers' own releases, which nothing else needs: in an environment of their own.
TRAINERS := .venv-integrations

test-integrations: $(TRAINERS)/.installed
	OMP_NUM_THREADS=1 $(TRAINERS)/bin/pytest -m "slow or not slow" tests/integrations

# The core tests on the lowest, a middle and the newest torch, on several Pythons. Each torch is a download of several GB,
# which is deleted after use. PAIRS="2.6.0/3.11 newest/3.13" takes some of them.
test-versions: $(DEMO)
	$(BIN)/python -m pip install --quiet uv
	OMP_NUM_THREADS=1 $(BIN)/python -m blockhf_lab.versions run --uv $(BIN)/uv $(if $(PAIRS),--pairs $(PAIRS))
	$(BIN)/python -m blockhf_lab.versions page

# Random cases and interrupted steps, for FUZZ_SECONDS each; the records go on where they stopped.
FUZZ_SECONDS ?= 600

fuzz: $(DEMO)
	OMP_NUM_THREADS=1 $(BIN)/blockhf fuzz cases --number 10000 --seconds $(FUZZ_SECONDS)
	OMP_NUM_THREADS=1 $(BIN)/blockhf fuzz interrupts --number 1100 --seconds $(FUZZ_SECONDS)
	$(BIN)/blockhf fuzz page results/reliability --page docs/reliability.md

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
	$(BIN)/blockhf bench mesh

clean:
	rm -rf $(VENV) $(TRAINERS) build dist lab/build lab/dist site .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Library and lab in one call of pip: the lab then takes the library from here.
PROJECTS := pyproject.toml lab/pyproject.toml constraints.txt

$(DEMO): $(VENV)/bin/python $(PROJECTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . -e lab
	touch $@

# This installs what the demo needs too.
$(DEV): $(VENV)/bin/python $(PROJECTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" -e "lab[peers,tensorboard]"
	touch $@ $(DEMO)

$(TRAINERS)/.installed: $(PROJECTS)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,integrations]" -e lab
	touch $@

$(DOCS): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@
