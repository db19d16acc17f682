# Build tooling. Needs only make and Python 3.11 or newer; everything else comes from requirements.lock.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# `make -C` already changes directory; `make -f` does not, so every recipe works on paths below ROOT.
ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV := $(ROOT)/.venv
BIN := $(VENV)/bin
PY := $(BIN)/python
LOCK := $(ROOT)/requirements.lock
DEPS_STAMP := $(VENV)/.deps-installed
SETUP_STAMP := $(VENV)/.project-installed
DEMO_STAMP := $(VENV)/.demo-deps-installed
DEMO_SETUP_STAMP := $(VENV)/.demo-installed

# Interpreters that are tried for the virtual environment, best first. Override with `make setup PYTHON=...`.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3)

# Extra arguments: `make test ARGS="tests/kernel -k merge"`, `make demo ARGS=--help`.
ARGS ?=
PYTEST_PARALLEL ?= -n 2 --dist worksteal

.PHONY: help setup browser test test-net mutants demo bench bench-full lint audit proto proto-check lock clean

help: ## list the targets (default)
	@echo "echostore: targets of this Makefile"
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)$$/  \1|\2/p' $(ROOT)/Makefile | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

setup: $(SETUP_STAMP) ## create .venv from requirements.lock and install the project editable
	@echo "setup: .venv is up to date"

# The environment, made when there is none; a partly filled one is gone on with.
define make_venv
	@if [ ! -x $(PY) ]; then \
	  found=; \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "setup: no Python 3.11 or newer with venv found (tried: $(CANDIDATES)); install one, e.g. 'apt install python3.11-venv', 'brew install python@3.13' or 'pyenv install 3.13', or name it: make setup PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "setup: creating .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
endef

define install_project
	@echo "setup: installing echostore editable"
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable $(ROOT)
endef

$(DEPS_STAMP): $(LOCK)
	$(make_venv)
	@echo "setup: installing requirements.lock"
	@$(PY) $(ROOT)/tools/install.py all
	@touch $@ $(DEMO_STAMP)

$(SETUP_STAMP): $(DEPS_STAMP) $(ROOT)/pyproject.toml
	$(install_project)
	@touch $@ $(DEMO_SETUP_STAMP)

$(DEMO_STAMP): $(LOCK) $(ROOT)/tools/demo_packages.txt
	$(make_venv)
	@echo "setup: installing what the demonstration needs (Spark is most of it)"
	@$(PY) $(ROOT)/tools/install.py demo
	@touch $@

$(DEMO_SETUP_STAMP): $(DEMO_STAMP) $(ROOT)/pyproject.toml
	$(install_project)
	@touch $@

browser: ## find Chromium and Node, or install them where apt-get may (the tests of the browser's leaf need them)
	@missing=; \
	[ -n "$${ECHOSTORE_CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || missing="chromium"; \
	command -v node >/dev/null || missing="$$missing nodejs"; \
	if [ -z "$$missing" ]; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "browser: installing Debian's" $$missing; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $$missing >/dev/null; \
	else echo "browser: missing:" $$missing "; install them (apt, brew), or name a Chromium in ECHOSTORE_CHROMIUM" >&2; fi

test: setup browser ## run the test suite (ARGS="..." goes to pytest)
	@echo "test: pytest $(PYTEST_PARALLEL) $(ARGS)"
	@cd $(ROOT) && $(PY) -m pytest $(PYTEST_PARALLEL) $(ARGS)

test-net: setup ## run the tests in network namespaces (root, or user namespaces; needs iproute2)
	@echo "test-net: pytest tests/net $(ARGS)"
	@cd $(ROOT) && $(PY) -m pytest -n 2 tests/net $(ARGS)

mutants: setup ## plant the catalogued bugs and see tests fail (ARGS="--row B15", "--sample 4"; all of them takes an hour)
	@cd $(ROOT) && $(PY) tools/mutants.py $(ARGS)

demo: $(DEMO_SETUP_STAMP) ## run the demonstration; sets up only what that needs
	@echo "demo: echostore demo $(ARGS)"
	@cd $(ROOT) && $(BIN)/echostore demo $(ARGS)

bench: setup ## run the benchmarks
	@echo "bench: echostore bench $(ARGS)"
	@cd $(ROOT) && $(BIN)/echostore bench $(ARGS)

bench-full: setup ## run the benchmarks of pipeline and thin clients at full size (tens of minutes)
	@echo "bench-full: echostore bench pipeline thin with 5,000,000 messages, 100,000 specs"
	@cd $(ROOT) && ECHOSTORE_BENCH_MESSAGES=5000000 ECHOSTORE_BENCH_THIN=1 $(BIN)/echostore bench pipeline thin $(ARGS)

# mypy runs without its cache: the cache keeps "no attribute" errors about modules that were created since.
lint: setup ## ruff check, ruff format --check, mypy --strict, lint-imports; runs all four, fails if any fails
	@cd $(ROOT); failed=; \
	step() { echo "lint: $$1"; shift; "$$@" || failed=yes; }; \
	step "ruff check" $(BIN)/ruff check .; \
	step "ruff format --check" $(BIN)/ruff format --check .; \
	step "mypy --strict src" $(BIN)/mypy --strict --no-incremental src; \
	step "lint-imports" $(BIN)/lint-imports --no-cache --no-logo; \
	if [ -n "$$failed" ]; then echo "lint: failed" >&2; exit 1; fi; \
	echo "lint: clean"

audit: setup ## ask advisory sources for known vulnerabilities of requirements.lock; says so when none can be reached
	@cd $(ROOT) && $(PY) tools/audit.py

proto: setup ## regenerate src/echostore/wire/generated from src/echostore/wire/schema
	@echo "proto: generating src/echostore/wire/generated"
	@cd $(ROOT) && $(PY) tools/proto.py

proto-check: setup ## fail if the generated code does not match the schema
	@echo "proto-check: comparing src/echostore/wire/generated with a fresh generation"
	@cd $(ROOT) && $(PY) tools/proto.py --check

lock: setup ## resolve pyproject.toml again and rewrite requirements.lock (keeps pins that still fit; ARGS=--upgrade)
	@echo "lock: resolving pyproject.toml into requirements.lock (minutes where hashes are new)"
	@cd $(ROOT) && $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	  --extra arrow --extra pipeline --extra sql --extra web --extra lan --extra metrics --extra dev --output-file requirements.lock $(ARGS) pyproject.toml
	@$(PY) -c 'import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text("".join(l for l in p.read_text().splitlines(True) if l.strip() and l.lstrip()[0] != "\x23"))' $(LOCK)
	@$(PY) $(ROOT)/tools/demo_packages.py
	@if grep -nE '://|^-|(index-url|find-links|trusted-host)|@ ' $(LOCK); then echo "lock: requirements.lock names an address, see above" >&2; exit 1; fi

clean: ## remove .venv, caches and build output
	@echo "clean: removing .venv, caches and build output"
	@cd $(ROOT) && rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	@find $(ROOT)/src $(ROOT)/tests $(ROOT)/tools -name __pycache__ -type d -prune -exec rm -rf {} +
