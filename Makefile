# `make demo` and `make test` need Python 3.11 and make, nothing else: the first run builds .venv, later ones reuse it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
TORCH := torch==2.13.0
TESTS := -n 2 --dist worksteal
PYTEST := $(BIN)/pytest $(TESTS)
EMPTY := build/empty

.PHONY: demo test test-fast style format coverage docs package clean

demo: $(READY)
	$(BIN)/fairpruner demo --output demo-output --force

test: style
	$(PYTEST)

test-fast: style
	$(PYTEST) -m "not slow"

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --quiet --offline .github

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(READY)
	$(BIN)/coverage run -m pytest $(TESTS)
	$(BIN)/coverage combine
	$(BIN)/coverage report
	$(BIN)/coverage html

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds what would be published, and tries the wheel where nothing of this folder can be imported.
package: $(READY)
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet $(TORCH)
	$(EMPTY)/bin/python -m pip install --quiet "$$(echo dist/*.whl)[cli,train,demo]"
	cd $(EMPTY) && bin/fairpruner demo --output demo-output

# torch goes first and pinned: a looser range lets the resolver pick a build that pulls gigabytes of CUDA packages.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet torchvision==0.28.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv build dist site htmlcov .coverage* demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
