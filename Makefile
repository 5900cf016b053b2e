# Everything a newcomer needs, one word each; `make` lists the words.
#
#   make test PYTEST_ARGS="-k engine"      make demo DEMO_ARGS="--strategy fedasync"
#   make setup TORCH="torch==2.13.0 --index-url <address of the CPU builds>"

VENV  ?= .venv
TORCH ?= torch==2.13.0
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
LIBRARIES ?= .venv-libraries
PYTHONS   ?= python3.12 python3.13

DEMO_ARGS   ?=
PYTEST_ARGS ?=
# More than cores: many tests wait, for leases, disks and processes.
PYTEST_PROCESSES ?= 4
SPREAD := -n $(PYTEST_PROCESSES) --dist worksteal
BENCH_ARGS  ?=
MODULES      ?=
MUTANTS_ARGS ?=

# The tests start hundreds of processes: none is to compile the tree anew, whatever the shell says of bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: docs help setup test slow lint format demo prove mutants bench docker-test journeys libraries pythons protos wheel-test cockpit clean

help:  ## list these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## a virtual environment with all that the project needs
	@$(if $(PYTHON),VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/setup.sh --check)

# The stamp makes it happen once: again only when the dependencies or the way to install them change.
$(READY): pyproject.toml setup.py $(wildcard core/kernels/*.[ch]) scripts/setup.sh
	VENV="$(VENV)" TORCH="$(TORCH)" scripts/setup.sh
	@touch $@

# A test's own limit wants Python to go on. What hangs below it is told too, and its process ended; the others go on.
HANGS := -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true

test: setup  ## every test but those below
	$(BIN)/pytest $(SPREAD) $(HANGS) $(PYTEST_ARGS)

slow: setup  ## Ray, torch.compile, takeovers, a short soak, pages in a browser, examples for Flower, types
	$(BIN)/pytest -m "slow and not prove" $(SPREAD) $(HANGS) tests $(PYTEST_ARGS)

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

bench: setup  ## the benchmarks, as ratios against a bare stream and a copy in memory; BENCH_ARGS="calls codecs": these
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# An environment of its own: the site is made from the text of the code, nothing of it is imported.
docs: .venv-docs/.ready  ## the documentation as a site that opens from a disk: site/index.html
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	python3 -m venv .venv-docs
	.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/wanted.txt
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r .venv-docs/wanted.txt
	@touch $@

docker-test: setup  ## build the images and run them for real
	VENV="$(VENV)" docker/test.sh

journeys: setup  ## every page typed, in blank environments with the wheel, and its figures
	TORCH="$(TORCH)" $(BIN)/pytest -m journeys -v $(SPREAD) tests/journeys tests/cockpit/browser tests/api/test_page.py tests/api/test_notebook.py $(PYTEST_ARGS)

libraries: $(LIBRARIES)/.ready  ## the tests with the large libraries of others, in an environment of their own
	$(LIBRARIES)/bin/pytest -m libraries tests/libraries $(PYTEST_ARGS)

$(LIBRARIES)/.ready: pyproject.toml scripts/setup.sh
	VENV="$(LIBRARIES)" TORCH="$(TORCH)" EXTRA=libraries scripts/setup.sh
	@touch $@

pythons:  ## the tests with other Pythons, each in an environment of its own: PYTHONS="python3.13 /path/to/python3.12"
	set -e; for python in $(PYTHONS); do $(MAKE) test PYTHON="$$python" VENV=".venv-$${python##*/}"; done

protos: setup  ## generate the protobuf code again
	$(BIN)/python scripts/generate_protos.py

cockpit:  ## build the cockpit's pages again: cockpit/front -> cockpit/static, which is committed (node 20)
	cd cockpit/front && npm ci && npm run build

wheel-test: setup  ## the wheel, installed and tried from outside the tree
	$(BIN)/pytest tests/architecture/test_wheel.py $(PYTEST_ARGS)

clean:  ## remove the virtual environments and every cache
	rm -rf $(VENV) $(LIBRARIES) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
