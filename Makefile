# make demo: from nothing to a trained model, on a corpus that every machine has.   make test: everything CI checks.
PYTHON ?= python3
BIN := .venv/bin
CLOZE_DATA ?= ../shared/data
export CLOZE_DATA

.PHONY: demo test test-all lint benchmark clean

demo: .venv/installed
	test -e build/demo/manifest.json || \
	  $(BIN)/python data_prep/shard.py --docs demo --out build/demo --duplicates 2 --vocab-size 8192
	$(BIN)/python data_prep/verify.py build/demo
	$(BIN)/python data_prep/show.py build/demo --length 128 --index 7
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -- \
	  pretraining/train.py --recipe pretraining/recipes/demo.toml --data build/demo --run build/demo-run

test: .venv/installed-dev lint
	$(BIN)/python -m pytest

test-all: .venv/installed-dev lint
	$(BIN)/python -m pytest -m ""

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: .venv/installed-dev
	$(BIN)/python benchmarks/preparation.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/curve.py

# Both marks are newer than pyproject.toml once it is installed, so that nothing is installed twice.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,mpi]'
	touch .venv/installed $@

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
