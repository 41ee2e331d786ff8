# Each target does its own set-up: `make help` lists them.
#
#   PYTHON=/path/to/bin/python   borrow an environment that has torch instead of downloading it
#   ARGOSY_NATIVE=0              leave the Rust extension out

SHELL := /bin/bash
PYTHON ?=
VENV := .venv/bin/python
# Any Python 3 can start the script, which looks for the right one itself.
SCRIPTS := $(firstword $(PYTHON) $(shell command -v python3 || command -v python || echo python3))
SANDBOX := $(VENV) tools/sandbox.py
PYTEST := $(SANDBOX) $(VENV) -m pytest
RUFF := $(VENV) -m ruff
FAST := not system and not soak

.PHONY: help environment demo test test-system check bench soak docs
.DEFAULT_GOAL := help

help:
	@echo "make demo         four ranks train, one is killed, the run goes on; sets up .venv when needed"
	@echo "make test         check, then all tests that need neither root nor Debian packages"
	@echo "make test-system  as root: installs Debian packages, tests with real components"
	@echo "make check        ruff, pyright, rustfmt, clippy, the tidy test"
	@echo "make bench        side-by-side benchmarks"
	@echo "make soak         faults at random for long"
	@echo "make docs         check the links of README.md and docs/"
	@echo "PYTHON=...        borrow an environment that has torch instead of downloading 2.7 GB"

environment:
	@command -v $(SCRIPTS) >/dev/null || { echo "$(SCRIPTS) is not found; Python 3.11 or later is needed: on Debian, apt-get install python3 python3-venv"; exit 1; }
	@$(SCRIPTS) tools/environment.py $(PYTHON)

demo: environment
	@$(VENV) examples/demo.py

check: environment
	@echo "== ruff"; $(RUFF) check . && $(RUFF) format --check .
	@echo "== pyright"; PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV) -m pyright --pythonpath $(VENV)
	@if ! command -v cargo >/dev/null; then echo "== rustfmt, clippy: skipped, cargo is not on PATH (https://rustup.rs)"; \
	elif ! cargo clippy --version >/dev/null 2>&1 || ! cargo fmt --version >/dev/null 2>&1; then \
	echo "== rustfmt, clippy: skipped, not installed (rustup component add rustfmt clippy)"; \
	else echo "== rustfmt, clippy"; cd native && cargo fmt --check && cargo clippy --locked --release --quiet -- -D warnings; fi
	@echo "== tidy"; $(PYTEST) -q tests/tidy

test: check
	@echo "== tests"; $(PYTEST) -n 2 -m "$(FAST)"
	@echo "== tests of native code, without it"; ARGOSY_NATIVE=0 $(PYTEST) -n 2 -m "native and $(FAST)"
	@echo "== make test: passed"

test-system: environment
	@tools/packages.sh tests/system/packages.txt
	@$(VENV) -m pip --disable-pip-version-check install --quiet --no-input "transformers>=4.50"
	@$(PYTEST) -v -m system
	@echo "== make test-system: passed"

bench: environment
	@set -e; for name in launch failures researcher data collectives calls train checkpoint; do echo "== bench/$$name.py"; $(VENV) bench/$$name.py; done

soak: environment
	@$(PYTEST) -v -m soak

docs: environment
	@$(VENV) tools/docs.py
