# `make demo` and `make test` need Python 3.11 or later and a C compiler. Every target sets up .venv first, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the documentation site, with warnings as errors
SITE := $(BIN)/sphinx-build -c docs -d build/doctrees --fresh-env --fail-on-warning --keep-going --quiet . site
SWEEPS := attention gemm_share growth window window_growth window_encoders causal encoders reversible generation generation_source keras training preparation compare

.DEFAULT_GOAL := help
.PHONY: help setup demo test mutations lint format docs build bench results figures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create the virtual environment with every version pinned

# unlike -c, PIP_CONSTRAINT applies to build environments too
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python 3.11 or later is required; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet --editable ".[dev]"
	@touch $@

demo: setup ## train, test and time a classifier of file types on bytes; numbers and a picture in demo/
	$(BIN)/linformer demo

test: setup ## run all tests
	$(BIN)/pytest --numprocesses 2 --dist worksteal

mutations: setup ## check that the tests notice small bugs (about an hour); ONLY="3 10-20" for some of them
	$(BIN)/python tests/mutations.py $(ONLY)

lint: setup ## check style, formatting, types and documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(SITE)

format: setup ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## build the documentation site in site/, after updating its generated parts
	$(BIN)/python scripts/generate_docs.py
	$(SITE)
	@echo "Site in site/: open site/index.html"

build: setup ## build the sdist and the wheel in dist/, and run each in a new environment
	$(BIN)/python scripts/check_distributions.py

bench: setup ## measure speed and memory; CSVs in results/ (several hours; resumes); FRESH=1 discards earlier numbers
	for sweep in $(SWEEPS); do $(BIN)/linformer compare benchmarks/$$sweep.yaml $(if $(FRESH),--fresh) || exit; done
	$(BIN)/linformer compare --preset paper-table-3 --output results/paper_table_3.csv $(if $(FRESH),--fresh)
	$(BIN)/python benchmarks/profile_layers.py
	$(BIN)/python benchmarks/padding.py $(if $(DATA),$(DATA)/imdb)

results: setup ## train the models of docs/results.md (hours; resumes); DATA=DIRECTORY for local data
	$(BIN)/linformer study benchmarks/learning.yaml --output results/learning $(if $(DATA),--data $(DATA))

figures: setup ## draw every picture of the README and the documents again, from the CSVs in results/
	$(BIN)/linformer plot results/attention.csv --output results/attention.png
	$(BIN)/linformer plot results/growth.csv --output results/growth.png
	$(BIN)/linformer plot results/window_growth.csv --output results/window_growth.png
	$(BIN)/linformer plot results/window_encoders.csv --output results/window_encoders.png
	$(BIN)/linformer plot results/causal.csv --output results/causal.png
	$(BIN)/linformer plot results/encoders.csv --output results/encoders.png
	$(BIN)/linformer plot results/generation.csv --output results/generation.png
	$(BIN)/linformer plot results/keras.csv --output results/keras.png
	$(BIN)/linformer plot results/training.csv --output results/training.png
	$(BIN)/linformer plot results/compare.csv --output results/compare.png
	$(BIN)/linformer plot results/compare.csv --output results/compare.svg
	$(BIN)/linformer study benchmarks/learning.yaml --output results/learning --summary
	$(BIN)/linformer plot results/paper_table_3.csv --what paper-table --output results/paper_table_3.png
	$(BIN)/linformer plot results/paper_table_3.csv --what paper-table --output results/paper_table_3.svg
	$(BIN)/linformer plot results/spectrum --output results/spectrum

clean: ## remove everything these targets create, except results/
	rm -rf $(VENV) demo .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site
