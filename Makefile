# Every target works alone on a machine with Python 3.11 or newer and make: it builds .venv if it is missing.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin

# A second Python, new enough for ArviZ 1.x. What is on the path need not run: pyenv puts commands there that only say
# that their version is not selected; so pyenv's own versions are tried as well.
NEWER_PYTHON ?= $(shell for p in python3.13 python3.12 python3.14 \
	$$(ls -d "$$(pyenv root 2>/dev/null)"/versions/3.1[234].*/bin/python 2>/dev/null | sort -r); do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo $$p && break; done)
NEWER_VENV := .venv-newer
# Where the two generations of ArviZ, and of jax and flax, differ most.
SHORT_TESTS := README.md numpyro_wide/diagnostics tests/test_package.py tests/test_arviz.py

PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Pages and docstrings, whose code is run, and tests of studies, which are run as well.
PAGES := README.md docs numpyro_wide studies/tests
# Of the pages' text and numbers: their docstrings say what to do if one fails.
LINT_OF_PAGES := docs/tests/test_pages.py docs/tests/test_figures.py

.PHONY: demo test test-ci test-as-compiled test-pages test-all mutants test-newer test-newer-short newer-environment coverage lint bench docs wheel clean

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "numpyro_wide needs Python 3.11 or newer; none was found on PATH"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: reinstalled when pyproject.toml changes.
$(VENV)/.%-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

demo: $(VENV)/.examples-installed
	$(BIN)/python -W ignore::FutureWarning examples/wrap_sample_predict.py

# Two marks at tests say what is run: what bears neither by `make test`, what is not slow by CI, all by `make test-all`.
QUICK = QUICK_COMPILE=1 $(PYTEST) -m "not as_compiled and not slow"

test: $(VENV)/.dev-installed
	$(QUICK) $(PYTEST_ARGS)

test-pages: $(VENV)/.dev-installed
	$(QUICK) $(or $(PYTEST_ARGS),$(PAGES))

# Both, in one session.
test-ci: $(VENV)/.dev-installed
	$(QUICK) tests $(PAGES)

# With all optimisations.
test-as-compiled: $(VENV)/.dev-installed
	$(PYTEST) -m "as_compiled and not slow" $(or $(PYTEST_ARGS),tests studies/tests)

test-all: $(VENV)/.dev-installed
	$(PYTEST) -m as_compiled tests studies/tests
	QUICK_COMPILE=1 $(PYTEST) -m "not as_compiled" tests $(PAGES)
	@$(MAKE) --no-print-directory test-newer

# Faults put into copies of the package, each of which a test must notice: all of them, or those that hold ONLY.
mutants: $(VENV)/.dev-installed
	QUICK_COMPILE=1 $(BIN)/python -m tests.mutants $(if $(ONLY),"$(ONLY)")

test-newer:
	@if test -n "$(NEWER_PYTHON)"; then $(MAKE) test VENV=$(NEWER_VENV) PYTHON="$(NEWER_PYTHON)"; \
	else echo "No Python 3.12 or newer was found: name one with NEWER_PYTHON=..."; fi

# Without a newer Python there is nothing to make.
newer-environment:
	@test -z "$(NEWER_PYTHON)" || $(MAKE) --no-print-directory $(NEWER_VENV)/.dev-installed VENV=$(NEWER_VENV) PYTHON="$(NEWER_PYTHON)"

test-newer-short:
	@$(MAKE) --no-print-directory test-newer PYTEST_ARGS="$(SHORT_TESTS)"

coverage: $(VENV)/.dev-installed
	QUICK_COMPILE=1 $(PYTEST) --cov=numpyro_wide --cov-report=term-missing:skip-covered $(or $(PYTEST_ARGS),tests $(PAGES))

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(LINT_OF_PAGES)

bench: $(VENV)/.bench-installed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(VENV)/.docs-installed
	$(BIN)/sphinx-build -j 3 -W --keep-going -b html docs docs/_build/html

wheel: $(VENV)/.dev-installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python .ci/check_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) $(NEWER_VENV) dist docs/_build figures .pytest_cache .ruff_cache .mypy_cache .hypothesis
