# Everything a newcomer needs, one word each; `make` lists the words.
#
#   make test PYTEST_ARGS="-k engine"      make demo DEMO_ARGS="--strategy fedasync"
#   make setup TORCH="torch==2.13.0 --index-url <address of the CPU builds>"

VENV  ?= .venv
TORCH ?= torch==2.13.0
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

DEMO_ARGS   ?=
PYTEST_ARGS ?=
PYTEST_PROCESSES ?= 3
BENCH_ARGS  ?=
MODULES      ?=
MUTANTS_ARGS ?=

# The tests start hundreds of processes: none is to compile the tree anew, whatever the shell says of bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup test lint format demo prove mutants bench docker-test journeys protos wheel-test clean

help:  ## list these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## a virtual environment with all that the project needs

# The stamp makes it happen once: again only when the dependencies or the way to install them change.
$(READY): pyproject.toml scripts/setup.sh
	VENV="$(VENV)" TORCH="$(TORCH)" scripts/setup.sh
	@touch $@

test: setup  ## every test but the long proofs and the containers
	$(BIN)/pytest -n $(PYTEST_PROCESSES) $(PYTEST_ARGS)

lint: setup  ## style, types and import contracts (the tests check them as well)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup  ## put the code in the one format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

demo: setup  ## a real server, eight unequal devices, real images, a report
	$(BIN)/anabranch demo $(DEMO_ARGS)

prove: setup  ## the long forms of the proofs, and their figures: seeds with every fault, kills, hostile clients
	$(BIN)/pytest -m prove -v $(PYTEST_ARGS)

mutants: setup  ## which small changes to the code its tests notice: MODULES="core/engine/ledger.py"
	nice -n 19 $(BIN)/python -m scripts.mutants $(MODULES) $(MUTANTS_ARGS)

bench: setup  ## the benchmarks, as ratios against a bare stream and a copy in memory
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docker-test: setup  ## build the images and run them for real
	VENV="$(VENV)" docker/test.sh

journeys: setup  ## every page typed, in blank environments with the wheel, and its figures
	TORCH="$(TORCH)" $(BIN)/pytest -m journeys -v tests/journeys $(PYTEST_ARGS)

protos: setup  ## generate the protobuf code again
	$(BIN)/python scripts/generate_protos.py

wheel-test: setup  ## the wheel, installed and tried from outside the tree
	$(BIN)/pytest tests/architecture/test_wheel.py $(PYTEST_ARGS)

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
