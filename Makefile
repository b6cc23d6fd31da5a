# make demo: from nothing to a model and its scores, on a corpus that every machine has.   make test: the tests of every day.
#
# Everything is installed in the versions of requirements.lock. `make LOCK= test` lifts the pins and takes the newest that
# pyproject.toml allows (make clean-venv first, where older ones are installed); `make lock` writes the file anew.
PYTHON ?= python3
BIN := .venv/bin
LOCK ?= requirements.lock
CHECK := data_prep/common/beginning.py
INSTALL := $(BIN)/python $(CHECK) && $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(LOCK),--constraint $(LOCK))
# One process more than the cores of CI: while one waits, for a signal, a silence or a clock, others compute. With two more
# the same tests take 338 s in place of 288: each loads all modules.
PROCESSES := 3
TESTS = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# make gpu: the measurements for a machine with a GPU, whose own torch is kept. See docs/gpu.md.
GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= accelerate annotated-doc annotated-types anyio click deepspeed docstring-parser einops execnet h11 hf-xet \
  hjson httpcore2 httpx2 huggingface-hub hypothesis idna iniconfig markdown-it-py mdurl msgpack ninja \
  packaging pluggy psutil py-cpuinfo pydantic pydantic-core pygments pytest pytest-timeout pytest-xdist pyyaml \
  regex rich safetensors sentencex shellingham sortedcontainers tokenizers tqdm transformers truststore \
  typeguard typer typing-extensions typing-inspection tyro
# The results stay in build/, where the next `make gpu` looks for them; OUT, which some machines set, gets a copy. The
# minutes count from here, with the time of the installation.
UNTIL := $(if $(MINUTES),$(shell expr $$(date +%s) + 60 \* $(MINUTES)))
GPU_PATH := PYTHONPATH="$(CURDIR)/build/gpu-site$${PYTHONPATH:+:$$PYTHONPATH}"
GPU := $(GPU_PATH) $(if $(DRY),$(BIN)/python,$(PYTHON))

.PHONY: demo cluster test test-processors test-timed test-lowest test-slow test-slurm test-all breaks style lint lock recipes-page benchmark gpu gpu-parts gpu-tables gpu-text gpu-wheels gpu-keep clean clean-venv

demo: .venv/installed
	test -e build/demo/manifest.json || \
	  $(BIN)/python data_prep/shard.py --docs demo --out build/demo --duplicates 2 --vocab-size 8192
	$(BIN)/python data_prep/verify.py build/demo
	$(BIN)/python data_prep/show.py build/demo --length 128 --index 7
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 \
	  pretraining/train.py --recipe demo --data build/demo --out build/demo-run
	test -e build/demo-task/package.toml || $(BIN)/python finetuning/fetch.py demo --out build/demo-task
	$(BIN)/python finetuning/run_task.py build/demo-task/package.toml --recipe demo --model build/demo-run \
	  --out build/demo-scores/pre-trained
	$(BIN)/python finetuning/run_task.py build/demo-task/package.toml --recipe demo --model build/demo-run --from-scratch \
	  --out build/demo-scores/from-scratch
	$(BIN)/python finetuning/compare.py build/demo-scores/from-scratch build/demo-scores/pre-trained
	@echo 'demo: every step works; next: . .venv/bin/activate, and docs/first-day.md'

# All that the jobs of cluster/ need, with MPI for the preparation of data.
cluster: .venv/installed-mpi

# Types are checked beside the tests, and told behind them.
test: style
	@mkdir -p build; $(BIN)/mypy >build/types 2>&1 & types=$$!; \
	echo '$(TESTS)'; $(TESTS); tests=$$?; \
	wait $$types; types=$$?; cat build/types; exit $$((tests | types))

# The tests closest to arithmetic again: limited to AVX2, to AVX2 with AVX-VNNI and to AVX512 without VNNI if the processor has
# them, then without a compiler.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
ANSWERS := tests/pretraining/answering tests/finetuning/model/test_serving.py
test-processors: .venv/installed-dev
	$(AVX2) CXX="g++ -march=x86-64-v3" $(TESTS) tests/pretraining/model tests/pretraining/answering \
	  tests/pretraining/engine tests/pretraining/optimizers tests/finetuning
	! grep -qw avx_vnni /proc/cpuinfo || $(AVX2) CXX="g++ -march=x86-64-v3 -mavxvnni" $(TESTS) $(ANSWERS)
	! grep -qw avx512bw /proc/cpuinfo || ONEDNN_MAX_CPU_ISA=AVX512_CORE CXX="g++ -march=x86-64-v4" $(TESTS) $(ANSWERS)
	CXX=none $(TESTS) tests/pretraining/model

# Tests that measure seconds, one at a time; nothing else should run meanwhile.
test-timed: .venv/installed-dev
	$(BIN)/python -m pytest -m "timed and not slurm"

test-slow: .venv/installed-dev
	$(TESTS) -m "slow and not slurm and not timed"

# The jobs of cluster/ on a small Slurm on this machine; as root, with the packages that .ci/run installs.
test-slurm: .venv/installed-dev
	$(TESTS) -m slurm

# The tests that stand closest to torch, with the lowest version that pyproject.toml allows; its Triton wants an older NumPy.
test-lowest: .venv-lowest/installed
	.venv-lowest/bin/python -m pytest --numprocesses $(PROCESSES) --dist loadfile \
	  tests/pretraining/model tests/pretraining/answering tests/pretraining/architectures tests/pretraining/engine tests/pretraining/optimizers

test-all: test test-processors test-timed test-slow test-slurm

# Breaks the product in some thirty places, one at a time, and says which test notices.
breaks: .venv/installed-dev
	$(BIN)/python tests/support/breaks.py

style: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

# torch pins its CUDA libraries itself: they are left out, so that a CPU build of torch fits the file too.
lock: .venv/installed-dev
	$(INSTALL) uv
	mkdir -p build
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --no-header --no-annotate --quiet | \
	  grep -vE '^(nvidia|cuda|triton)' | sed -E 's/^torch==([0-9.]+).*/torch==\1/' | uniq > build/requirements.lock
	test -s build/requirements.lock && mv build/requirements.lock requirements.lock

recipes-page: .venv/installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.recipe_pages

benchmark: .venv/installed-dev
	$(BIN)/python benchmarks/preparation.py
	$(BIN)/python benchmarks/throughput.py --contests mini-128-64 base-128-32 mini-512-16 base-512-4
	$(BIN)/python benchmarks/scaling.py --parallel.tensor 2
	$(BIN)/python benchmarks/report.py

GPU_READY := $(if $(DRY),.venv/installed-dev,build/gpu-site/installed)
gpu: $(GPU_READY) build/gpu-shards/manifest.json
	$(GPU) benchmarks/gpu/run.py $(if $(DRY),--dry) $(if $(AGAIN),--again) $(if $(PARTS),--parts $(PARTS)) $(if $(UNTIL),--until $(UNTIL))

gpu-parts: $(GPU_READY)
	$(GPU) benchmarks/gpu/run.py list

gpu-keep: $(GPU_READY)
	$(GPU) benchmarks/gpu/run.py keep

# 5 MB of real text, which are 12,000 sequences at 128
GPU_TEXT = $(if $(wildcard $(TEXT)/wiki),$(TEXT)/wiki/AA/wiki_0* --vocab $(TEXT)/vocab.txt --lengths 128 512 1024,demo)
build/gpu-shards/manifest.json: | $(GPU_READY)
	$(GPU) data_prep/shard.py --docs $(GPU_TEXT) --out build/gpu-shards

# Table 5 in minutes, of which the last is for runs to save and stop, and for the table of those that are done; gpu-text
# packs on a machine with the data what this needs in build/gpu-tables.
TABLES := build/gpu-tables
TEXT = $(or $(CLOZE_DATA),data)
gpu-tables: build/gpu-site/installed $(TABLES)/data.tar.xz
	test -d $(TABLES)/data || $(PYTHON) -m tarfile -e $(TABLES)/data.tar.xz $(TABLES)
	CLOZE_DATA=$(TABLES)/data $(GPU_PATH) timeout --kill-after 60 $$(expr 60 \* $(or $(MINUTES),9) - 59) \
	  $(PYTHON) benchmarks/reproduce.py table5 --scale gpu --out $(TABLES)/made || test $$? = 124
	$(if $(OUT),mkdir -p $(OUT) && cp $(TABLES)/made/table5-gpu*.json $(OUT) || true)

gpu-text: .venv/installed-dev
	rm -rf $(TABLES)/data
	$(BIN)/python data_prep/shard.py --docs $(TEXT)/wiki $(TEXT)/books --vocab-size 8192 --documents-only --out $(TABLES)/data/documents
	mkdir $(TABLES)/data/glue
	cd $(TEXT) && cp -r pairs $(CURDIR)/$(TABLES)/data && cp -r glue/STS-B glue/SST-2 glue/MRPC glue/RTE $(CURDIR)/$(TABLES)/data/glue
	cd $(TABLES) && $(CURDIR)/$(BIN)/python -m tarfile -c data.tar.xz data
	ls -l $(TABLES)/data.tar.xz

$(TABLES)/data.tar.xz:
	@echo "error: no $@: make gpu-text packs it on a machine with the data"; exit 2

gpu-wheels: .venv/installed-dev
	$(MAKE) DRY=1 build/gpu-shards/manifest.json
	rm -rf build/gpu-wheels
	ONLY="$(GPU_PACKAGES)" WHEELS=build/gpu-wheels FOR=$(GPU_PYTHON) PYTHON=$(BIN)/python cluster/offline.sh
	$(BIN)/python -c 'from benchmarks.measure import note_commit; note_commit()'

# Beside the packages of PYTHON, so that its own torch is kept, and nothing is installed that it has in the locked version
# or a later one; DeepSpeed must have the locked one.
GPU_WHEELS = $(wildcard build/gpu-wheels)
ABSENT := import sys, re; from importlib.metadata import distributions; \
  from pip._vendor.packaging.requirements import Requirement; \
  has = {re.sub("[-_.]+", "-", each.metadata["Name"] or "").lower(): each.version for each in [*distributions()][::-1]}; \
  lines = [line if line.startswith("deepspeed=") else line.replace("==", ">=", 1) for line in open("requirements.lock")]; \
  locked = {each.name: each.specifier for each in map(Requirement, lines) if not each.marker or each.marker.evaluate()}; \
  fits = lambda name: name in has and (name not in locked or locked[name].contains(has[name], prereleases=True)); \
  print(*(name for name in sys.argv[1:] if not fits(name)))
build/gpu-site/installed: requirements.lock $(GPU_WHEELS)
	@$(PYTHON) -c 'import torch' || { echo 'error: $(PYTHON) has no torch: install one for your GPU, or name another: make gpu PYTHON=...'; exit 2; }
	rm -rf build/gpu-site
	mkdir -p build/gpu-site
	absent=$$($(PYTHON) -c '$(ABSENT)' $(GPU_PACKAGES)) || exit; test -z "$$absent" || \
	  DS_BUILD_OPS=0 $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target build/gpu-site \
	  $(if $(GPU_WHEELS),--no-index --find-links build/gpu-wheels,--constraint requirements.lock) $$absent
	touch $@

# The marks are newer than pyproject.toml once it is installed, so that nothing is installed twice. A Python that will not
# do is told in a line, and leaves nothing behind that the next try would take for an environment. For tests, modules are
# compiled where one loads them: to compile all takes half a minute.
.venv/bin/python:
	@$(PYTHON) $(CHECK)
	$(PYTHON) -m venv --clear .venv || { rm -rf .venv; exit 2; }

.venv/installed: pyproject.toml requirements.lock | .venv/bin/python
	$(INSTALL) -e .
	touch $@

.venv/installed-mpi: pyproject.toml requirements.lock | .venv/bin/python
	$(INSTALL) -e '.[mpi]'
	touch .venv/installed $@

.venv/installed-dev: pyproject.toml requirements.lock | .venv/bin/python
	$(INSTALL) --no-compile -e '.[dev,mpi]'
	touch .venv/installed .venv/installed-mpi $@

LOWEST_TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
.venv-lowest/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear .venv-lowest
	grep -vE '^(torch|triton|numpy|setuptools)=' requirements.lock > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint .venv-lowest/constraints.txt \
	  'torch==$(LOWEST_TORCH).0' 'numpy<2.4' pytest pytest-timeout pytest-xdist hypothesis transformers -e .
	touch $@

# All but the results of days: build/reproduction, build/recipe-* and build/gpu.
clean:
	test ! -d build || find build -mindepth 1 -maxdepth 1 ! -name reproduction ! -name 'recipe-*' ! -name gpu -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache

clean-venv:
	rm -rf .venv .venv-lowest
