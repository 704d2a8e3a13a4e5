# `make demo` and `make test` need Python 3.11 and make, nothing else: the first run builds .venv, later ones reuse it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test format clean

demo: $(READY)
	$(BIN)/fairpruner demo --output demo-output --force

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist worksteal

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes first and pinned: a looser range lets the resolver pick a build that pulls gigabytes of CUDA packages.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet torchvision==0.28.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
