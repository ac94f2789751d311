# Everything runs in .venv, which is made on first use. `make help` lists the targets.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-distributed check docs bench wheels clean distclean

VENV := .venv
BIN := $(VENV)/bin
# Two stamps in one environment: what `make demo` needs is quick to install, the tools for development come on top.
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
BUILD_INPUTS := pyproject.toml hatch_build.py lazyshards/_native/cudastub.c lazyshards/_native/gather.c \
	lazyshards/_native/parquet.c
# Several ranks need wheels of their own.
CLUSTER := .venv-cluster
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

demo: $(RUNTIME) ## set up, then write, open, slice and compute a small dataset on the best engine there is
	@$(BIN)/lazyshards demo

test: $(DEV) ## set up, then run all tests; pick some with ARGS="-k name"
	$(BIN)/python -m pytest $(ARGS)

test-distributed: $(CLUSTER)/.installed ## set up a second environment, then run on 2 and 4 ranks over Open MPI
	LAZYSHARDS_REQUIRE_ENGINES=numpy,legate $(CLUSTER)/bin/python -m pytest tests/distributed $(ARGS)

check: $(DEV) ## lint, format, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py

docs: $(DOCS) ## build the site into docs/_build/html; a warning, or a link that leads nowhere, is an error
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --quiet docs docs/_build/html
	@echo "Built: docs/_build/html/index.html"

bench: $(DEV) ## measure against peers; options with ARGS="--help"
	$(PIP) install --group bench
	$(BIN)/python -m benchmarks $(ARGS)

wheels: $(DEV) ## build sdist and wheels into dist/, and try them in fresh environments of every Python there is
	$(PIP) install --group release
	$(BIN)/python tests/release/wheels.py $(ARGS)

clean: ## remove what was built and the tools' caches
	rm -rf build dist docs/_build docs/notebooks .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

distclean: clean ## and the environment and the compiled libraries
	rm -rf $(VENV) $(CLUSTER) lazyshards/_native/*.so

# The first Python on the PATH that is new enough and can make an environment with pip in it.
$(BIN)/python:
	@best=; old=; \
	for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	  path=$$(command -v $$name) || continue; \
	  if ! $$path -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    old="$$old $$($$path --version 2>/dev/null)"; continue; fi; \
	  if ! $$path -c 'import venv, ensurepip' 2>/dev/null; then bare=$$name; continue; fi; \
	  best=$$path; break; \
	done; \
	if [ -z "$$best" ] && [ -n "$$bare" ]; then \
	  echo "$$bare cannot make virtual environments: its venv module is missing." >&2; \
	  echo "  Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	elif [ -z "$$best" ]; then \
	  echo "lazyshards needs Python 3.11 or newer$${old:+; found$$old}." >&2; \
	  echo "  Debian 12, Ubuntu 24.04 and newer: apt-get install python3 python3-venv" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$best --version) ($$best)"; \
	$$best -m venv $(VENV)

$(RUNTIME): $(BUILD_INPUTS) | $(BIN)/python
	@echo "Installing lazyshards with Legate into $(VENV): about 2 GB the first time, some minutes"
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --editable '.[legate]'
	@test -e lazyshards/_native/libcuda_stub.so || { \
	  echo "No C compiler: without an NVIDIA driver Legate will not start, and the NumPy engine serves."; \
	  echo "  To change that: apt-get install gcc libc6-dev && rm $@ && make demo"; }
	@touch $@

# The same Python makes the second environment.
$(CLUSTER)/.installed: $(BUILD_INPUTS) | $(BIN)/python
	@echo "Installing lazyshards with a Legate that has networking, and Open MPI, into $(CLUSTER): some minutes"
	@$(BIN)/python -m venv $(CLUSTER)
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade 'pip>=25.1'
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[cluster]'
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check --quiet install --group test-distributed
	@touch $@

$(DEV): $(RUNTIME) pyproject.toml
	@echo "Installing what the tests and checks need"
	@$(PIP) install --group test --group check
	@touch $@

$(DOCS): $(DEV)
	@echo "Installing what builds the site"
	@$(PIP) install --group docs
	@touch $@
