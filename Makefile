# make run         install into .venv and train the recipe ffn_auto on 8 local processes (ARGS="KEY=VALUE ..." to change it)
# make test        install and run a sample of the tests with every kind of proof: five minutes
# make test-all    all other tests, style, types and imports; TAIL=no leaves out the tests that take long
# make lint        style, types and imports only
# make format      put style right
# make generate    write the defaults in conf/ and the pages of docs/ that are generated
# make coverage    compare every architecture under every plan with one device, and write docs/coverage.md
# make gpu         run everything on one GPU, and write docs/gpu.md; exits with 2 where there is none
# make docs        build the site into site/; warnings are errors
# make fuzz        compare N random graphs (1000) with one device; SEED draws others (0)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Half of what is installed is never imported, and compiling all of it took a third of the time: what every command
# imports is compiled, with our own modules, so that none does so itself, each time where Python writes no byte code; the
# rest where it is imported.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile -c constraints.txt
IMPORTED := antlr4 deepspeed fsspec hydra jinja2 mpmath networkx numpy omegaconf pydantic rich sympy torch yaml
COMPILE := $(BIN)/python -m compileall -q -q -j 2 $(addprefix $(VENV)/lib/python3*/site-packages/,$(IMPORTED)) \
    meshwright models runner strategies
unexport PYTHONDONTWRITEBYTECODE
TORCH := torch==2.13.0
# Draws the sample of `make test` and the graphs of `make fuzz`.
SEED ?= 0
# Two processes, whatever the machine: a test may start eight ranks of its own. The one that is done first takes over
# half of what the other has left.
PARALLEL := -n 2 --dist worksteal
INPUTS := pyproject.toml constraints.txt

.PHONY: run test test-all rest launchers browser lint format generate coverage gpu docs fuzz clean

run: $(VENV)/.installed
	$(BIN)/run +recipe=ffn_auto parallel.search=sharding_propagation $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q $(PARALLEL) --part=sample --seed=$(SEED) $(ARGS)

# The slow tests start launchers and browsers of the system.
test-all: $(VENV)/.installed-test $(if $(filter no,$(TAIL)),,launchers browser)
	$(MAKE) -j 2 lint rest

rest: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q $(PARALLEL) --part=rest --seed=$(SEED) $(if $(filter no,$(TAIL)),,-m "slow or not slow") $(ARGS)

# What the slow tests of launchers start, and the hosts that they make of network namespaces, which need root.
launchers:
	@for program in mpirun pdsh ip; do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get install -y -q openmpi-bin pdsh iproute2; \
	elif [ -n "$$missing" ]; then \
	    echo "the slow tests of launchers need$$missing, and root: apt-get install openmpi-bin pdsh iproute2"; exit 1; \
	fi

# What draws the reports in a slow test.
browser:
	@for program in chromium chromium-browser google-chrome chrome-headless-shell firefox; do \
	    command -v $$program >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get install -y -q --no-install-recommends chromium; \
	else \
	    echo "a slow test needs a browser, and root to install it: apt-get install chromium"; exit 1; \
	fi

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.installed
	$(BIN)/python -m runner.config.generate
	$(BIN)/python -m runner.cli.verbs > docs/reference/cli.md
	$(BIN)/python -m runner.refusals > docs/troubleshooting.md

coverage: $(VENV)/.installed-test
	$(BIN)/python -m tests.matrix --write docs/coverage.md $(ARGS)

gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz --graphs $(or $(N),1000) --seed $(SEED) $(ARGS)

clean:
	rm -rf $(VENV) site build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: DeepSpeed looks for it while it is built.
$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV); this takes a minute or two the first time"
	$(PIP) $(TORCH)
	$(PIP) -e .
	$(COMPILE) || true  # torch has files that are no Python
	touch $@

# torchtitan requires older datasets than ours, which what the tests use of it does not read.
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test]"
	$(PIP) --no-deps "torchtitan; python_version >= '3.11'"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e ".[docs]"
	touch $@
