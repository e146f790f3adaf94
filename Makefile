# The commands of a developer, and of somebody who wants to see it work. Needs Python 3.11 to 3.13,
# GNU make and bash. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The Python that .venv is made from: make install PYTHON=python3.12
PYTHON ?= python3

VENV := .venv
# A notebook's environment: the client and no vLLM.
NOTEBOOK := .venv-notebook
RUN := $(VENV)/bin/python
# Touched when the installation is complete; older than pyproject.toml, it is done again.
INSTALLED := $(VENV)/.installed

SMOLLM2 := .models/smollm2-135m-instruct
TINY := .models/tiny-llama
# Inputs at each entry of the Jupyter server, and bodies at the real engine, which takes longer.
FUZZ := 10000
FUZZ_BODIES := $(FUZZ)
PROXY := .proxy/configurable-http-proxy

.PHONY: help bench bubblewrap install notebook models proxy demo serve test fuzz lint format clean distclean

help: ## List these commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 18

install: $(INSTALLED) ## Make .venv with the package and all that the other commands need

$(INSTALLED): pyproject.toml tools/install.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); this needs Python 3.11, 3.12 or 3.13:" \
	    "make install PYTHON=python3.11" >&2; exit 1; }
	@[ -x $(RUN) ] || { echo "install: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(RUN) tools/install.py
	@touch $@

# The tool looks at the dates itself, because the tests call it as well.
notebook: install ## Make .venv-notebook, which has no vLLM, for the notebooks of examples/
	@$(RUN) tools/install.py notebook $(NOTEBOOK)

models: $(SMOLLM2)/config.json $(TINY)/config.json ## Make the two models of the demo and the tests in .models

$(SMOLLM2)/config.json: | $(INSTALLED)
	@echo "models: SmolLM2-135M-Instruct, a minute"
	@$(RUN) tools/models.py smollm2 $(SMOLLM2)

$(TINY)/config.json: | $(INSTALLED)
	@echo "models: a tiny random Llama, seconds"
	@$(RUN) tools/models.py tiny $(TINY)

proxy: $(PROXY) ## Install JupyterHub's proxy in .proxy, for the tests that go through it

# It is no error when it cannot be installed: the tests that need it are skipped with the reason.
$(PROXY): tools/proxy.py | $(INSTALLED)
	@$(RUN) tools/proxy.py $(@D)

demo: install $(SMOLLM2)/config.json ## Start a server on the CPU, run the quick-start notebook against it, stop it
	@$(RUN) tools/demo.py notebook $(SMOLLM2)

serve: install $(SMOLLM2)/config.json ## Start a server on the CPU and leave it running until Ctrl-C
	@$(RUN) tools/demo.py serve $(SMOLLM2)

bubblewrap: ## Install bubblewrap from Debian where it is missing, for the tests that need it
	@command -v bwrap >/dev/null || { echo "bubblewrap: installing it from Debian"; \
	  { apt-get update -qq && apt-get install -y -qq bubblewrap; } >/dev/null 2>&1 || \
	  echo "bubblewrap: not installed; the tests that need it are skipped, or fail where CI=true"; }

# Processes of their own: importing nnsight, which all but the unit tests do, changes every object.
test: install notebook models proxy bubblewrap ## Run all tests; ARGS="-k name" for some of them
	@echo "test: pytest tests/unit $(ARGS)"
	@$(RUN) -m pytest tests/unit $(ARGS)
	@echo "test: pytest tests/client $(ARGS)"
	@$(RUN) -m pytest tests/client $(ARGS)
	@echo "test: pytest tests/engine $(ARGS)"
	@$(RUN) -m pytest tests/engine $(ARGS)
	@echo "test: pytest tests/examples $(ARGS)"
	@$(RUN) -m pytest tests/examples $(ARGS)
	@echo "test: pytest tests/proxies $(ARGS)"
	@$(RUN) -m pytest tests/proxies $(ARGS)
	@echo "test: pytest tests/hub $(ARGS)"
	@$(RUN) -m pytest tests/hub $(ARGS)

fuzz: install models ## Try 10,000 arbitrary inputs at every entry; FUZZ=1000 for so many
	@echo "fuzz: pytest tests/unit/test_fuzz.py --fuzz $(FUZZ)"
	@$(RUN) -m pytest tests/unit/test_fuzz.py --fuzz $(FUZZ) --timeout 1200
	@echo "fuzz: pytest tests/engine/test_any_input.py --fuzz $(FUZZ_BODIES)"
	@$(RUN) -m pytest tests/engine/test_any_input.py --fuzz $(FUZZ_BODIES) --timeout 1200
	@if $(RUN) -m pip install --quiet --disable-pip-version-check atheris; then \
	  for target in scan frames names; do \
	    echo "fuzz: tests/fuzz/coverage_guided.py $$target"; \
	    $(RUN) tests/fuzz/coverage_guided.py $$target -runs=$(FUZZ)0 -seed=1 -verbosity=0; \
	  done; \
	else echo "fuzz: atheris does not install here, so its three targets are left out"; fi

bench: install $(TINY)/config.json ## Measure against vLLM alone and nnsight-serve, half an hour; ARGS="--work logits"
	@$(RUN) -m benchmarks $(ARGS)

lint: install ## Run ruff, ruff format --check and mypy --strict
	@echo "lint: ruff check"
	@$(VENV)/bin/ruff check .
	@echo "lint: ruff format --check"
	@$(VENV)/bin/ruff format --check .
	@echo "lint: mypy"
	@$(VENV)/bin/mypy

format: install ## Put the sources into ruff's format
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .

clean: ## Remove caches and builds; keep .venv, .venv-notebook, .models and .proxy
	@echo "clean: caches and builds"
	@rm -rf dist build .logs .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv, .venv-notebook, .models and .proxy as well
	@echo "distclean: $(VENV), $(NOTEBOOK), .models and .proxy"
	@rm -rf $(VENV) $(NOTEBOOK) .models .proxy
