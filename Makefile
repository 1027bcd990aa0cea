# Every target works alone on a machine with Python 3.11 or newer and make: it builds .venv if it is missing.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench docs clean

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "numpyro_wide needs Python 3.11 or newer; none was found on PATH"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: reinstalled when pyproject.toml changes.
$(VENV)/.%-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

demo: $(VENV)/.examples-installed
	$(BIN)/python examples/repriorised_bnn.py

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs-installed
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build figures .pytest_cache .ruff_cache .mypy_cache .hypothesis
