PYTHON ?= python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install check test test-all test-gpu quickstart docs bench

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: ## Install the package, editable, with all that development needs
	$(PYTHON) -m pip install -e ".[dev]"

check: ## Lint, formatting and types
	ruff check .
	ruff format --check .
	mypy

test: ## Run the tests and doctests that are not marked slow; ARGS go to pytest, as in: make test ARGS="-k wire"
	$(PYTHON) -m pytest $(ARGS)

test-all: ## Run all tests, the slow ones included; ARGS go to pytest
	$(PYTHON) -m pytest -m "" $(ARGS)

STACKS = tests/contract/test_stacked_parity.py tests/contract/test_stacked_evaluation.py tests/federated/local/stacked
test-gpu: ## Run the tests of stacks, and those that need a GPU, on a CUDA device
	SPARSEFL_TEST_DEVICE=cuda $(PYTHON) -m pytest -v $(STACKS) $(ARGS)
	$(PYTHON) -m pytest -m gpu $(ARGS)

quickstart: ## Train the first federation, on a CPU and without a download
	sparsefl fit --config configs/quickstart.yaml

docs: ## Build the site of the documentation in build/docs/html; warnings are errors
	$(PYTHON) docs/site/build.py -W --keep-going -q $(ARGS)

LONG = sparse_training moving_masks first_weights methods attacks gpu engines peers
bench: ## Run every benchmark but the long ones; benchmarks/README.md says what the numbers mean
	@set -e; for script in $(filter-out $(LONG:%=benchmarks/%.py),$(wildcard benchmarks/[!_]*.py)); do echo "== $$script"; $(PYTHON) $$script; done
