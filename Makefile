# `make demo` and `make test` need nothing but Python 3.11 or later and a C compiler; everything else is set up here, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test mutations lint format docs bench results figures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create the virtual environment with every version pinned

# PIP_CONSTRAINT reaches the build environments too, which -c does not
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet --editable ".[dev]"
	@touch $@

demo: setup ## learn kinds of files from the bytes of what is installed, test, time: numbers, and a picture in demo/
	$(BIN)/linformer demo

test: setup ## run all tests
	$(BIN)/pytest --numprocesses 2 --dist worksteal

mutations: setup ## check that the tests notice 60 small bugs (about an hour); ONLY="3 10-20" for some of them
	$(BIN)/python tests/mutations.py $(ONLY)

lint: setup ## check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## mend style and formatting where that can be done by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write docs/configuration.md again, from the types of the configuration
	$(BIN)/python -c 'from pathlib import Path; from linformer_kit.training.config_page import reference_page; \
	  Path("docs/configuration.md").write_text(reference_page(), encoding="utf-8")'

bench: setup ## measure speed and memory beside other packages; CSVs and pictures in results/ (over two hours; resumes)
	$(BIN)/python benchmarks/choices.py
	$(BIN)/python benchmarks/parts.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/models_profile.py
	$(BIN)/python benchmarks/keras_layers.py
	$(BIN)/python benchmarks/training.py $(if $(IMDB),--data $(IMDB))
	$(BIN)/linformer compare benchmarks/compare.yaml --output results/compare.csv
	$(BIN)/linformer compare --preset paper-table-3 --output results/paper_table_3.csv

results: setup ## train what docs/results.md tells of, Linformers beside full attention (hours; resumes); DATA=FOLDER for local data
	$(BIN)/python benchmarks/learning.py $(if $(DATA),--data $(DATA))

figures: setup ## draw every picture of the README and the documents again, from the CSVs in results/
	$(BIN)/python benchmarks/attention.py --summary
	$(BIN)/python benchmarks/models.py --summary
	$(BIN)/python benchmarks/keras_layers.py --summary
	$(BIN)/python benchmarks/training.py --summary
	$(BIN)/python benchmarks/learning.py --summary
	$(BIN)/linformer plot results/compare.csv --output results/compare.png
	$(BIN)/linformer plot results/compare.csv --output results/compare.svg
	$(BIN)/linformer plot results/paper_table_3.csv --what paper-table --output results/paper_table_3.png
	$(BIN)/linformer plot results/paper_table_3.csv --what paper-table --output results/paper_table_3.svg
	$(BIN)/linformer plot results/spectrum --output results/spectrum

clean: ## remove what these targets made, results/ excepted
	rm -rf $(VENV) demo .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
