# Each target sets up what it needs; `make help` lists them.

SHELL := /bin/bash
PYTHON ?=
VENV := .venv/bin/python
SANDBOX := $(VENV) tools/sandbox.py
PYTEST := $(SANDBOX) $(VENV) -m pytest
RUFF := $(VENV) -m ruff
FAST := not system and not soak and not engines
# One more than the usual two cores: tests wait for processes now and then.
WORKERS := 3

.PHONY: help environment demo test test-system test-engines check bench gpu soak docs wheel ruff pyright rust tests tests-without-native
.DEFAULT_GOAL := help

help:
	@echo "make demo         train on four ranks, kill some, compare the result"
	@echo "make test         make check, then the tests that need no root"
	@echo "make test-system  as root: install Debian packages, run the tests that need them"
	@echo "make test-engines as root: runs on a real Slurm and a real Ray cluster of this machine"
	@echo "make check        ruff, pyright, rustfmt, clippy, and this code's own rules"
	@echo "make bench        compare Argosy with torchrun and others, side by side"
	@echo "make gpu          on a machine with GPUs: kills, saves and steps; writes gpu.json"
	@echo "make soak         inject random faults for up to an hour"
	@echo "make wheel        build the wheel of a release into dist/"
	@echo "make docs         check the links in README.md and docs/"
	@echo
	@echo "The first call downloads up to 3 GB into .venv; it says how much first."
	@echo "PYTHON=/path/to/bin/python   borrow torch from another environment instead"
	@echo "ARGOSY_NATIVE=0              skip the Rust extension"

# Any Python from 3.11 on can run the set-up.
define set_up
	@for name in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$name -c 'import sys, venv; $(if $(PYTHON),,import ensurepip;) sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	exec $$name tools/environment.py $(1) $(PYTHON); fi; done; \
	echo "Python 3.11 or later with venv is needed; python3 is $$(python3 --version 2>/dev/null || echo missing)"; \
	echo "hint: on Debian, apt-get install python3 python3-venv"; exit 1
endef

environment:
	$(call set_up,dev)

demo:
	$(call set_up,demo)
	@# uv compiles no bytecode for the demo: without that of this run every start would compile torch.
	@env -u PYTHONDONTWRITEBYTECODE $(VENV) examples/demo.py

check: environment
	@$(MAKE) --no-print-directory ruff pyright rust
	@echo "== tidy"; $(PYTEST) -q tests/tidy

# pyright and clippy run beside the tests, which wait now and then. Any failure ends `make test` with an error.
test: environment
	@$(SANDBOX) --alone $(MAKE) --no-print-directory --jobs ruff pyright rust tests tests-without-native
	@echo "== make test: passed"

ruff:
	@$(RUFF) check --quiet . && $(RUFF) format --check --quiet . && echo "== ruff: passed"

pyright:
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV) -m pyright --pythonpath $(VENV) && echo "== pyright: passed"

rust:
	@if ! command -v cargo >/dev/null; then echo "== rustfmt, clippy: skipped, cargo is not on PATH (https://rustup.rs)"; \
	elif ! cargo clippy --version >/dev/null 2>&1 || ! cargo fmt --version >/dev/null 2>&1; then \
	echo "== rustfmt, clippy: skipped, not installed (rustup component add rustfmt clippy)"; \
	else cd native && cargo fmt --check && cargo clippy --locked --release --quiet -- -D warnings && \
	echo "== rustfmt, clippy: passed"; fi

# A file's tests run in one worker, since they share what is costly to start; conftest.py puts long files first.
tests:
	@$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(FAST)" && echo "== tests: passed"

tests-without-native:
	@ARGOSY_NATIVE=0 $(PYTEST) -q -m "native and $(FAST)" tests/native tests/transfer && \
	echo "== tests of native code, without it: passed"

test-system: environment
	@tools/packages.sh tests/system/packages.txt
	@tools/requirements.sh tests/system/requirements.txt
	@$(SANDBOX) --alone $(VENV) -m pytest -v -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m system
	@echo "== make test-system: passed"

test-engines: environment
	@tools/packages.sh tests/system/engine_packages.txt
	@tools/requirements.sh tests/system/engine_requirements.txt
	@$(SANDBOX) --alone $(VENV) -m pytest -v -m engines
	@echo "== make test-engines: passed"

bench: environment
	@$(VENV) bench/run.py

gpu: environment
	@$(VENV) bench/gpu.py

soak: environment
	@$(SANDBOX) --alone $(VENV) -m pytest -v -m soak

wheel: environment
	@tools/wheel.sh

docs: environment
	@$(VENV) tools/docs.py
