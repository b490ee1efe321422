# make test   lint, types and tests, from nothing
# make docs   the documentation site, in build/site
# make demo   the main job on the embedded default
# make check  long proofs, benchmarks and the release

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
DEMO   ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

# Nothing here may reach for a hub.
export HF_HUB_OFFLINE = 1
export HF_DATASETS_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: test lint types docs check release demo clean

# Two workers with a thread each: threads that wait for each other on shared cores are several times slower. A file is
# tested by one worker, because its tests share trained runs; tests/conftest.py says which files come first.
test: export OMP_NUM_THREADS = 1
test: lint types
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Strict: a broken link or anchor, a public name without documentation or a file that is fetched from elsewhere fails.
# (Not --quiet: with it mkdocs counts no warnings, and nothing fails.)
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

demo: $(READY)
	$(BIN)/platon prune --output "$(DEMO)"

check: $(READY) release
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow
	OMP_NUM_THREADS=1 $(BIN)/pytest -m hypothesis --hypothesis-profile=many
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/full_size.py
	$(BIN)/python benchmarks/sparse.py
	$(BIN)/python benchmarks/deploy.py
	$(BIN)/python benchmarks/other_processors.py
	$(BIN)/python benchmarks/compact.py
	$(BIN)/python benchmarks/communication.py
	$(BIN)/python benchmarks/distillation.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/proof.py
	$(BIN)/python benchmarks/architectures.py
	$(BIN)/python benchmarks/sparse_models.py
	$(BIN)/python benchmarks/mistakes.py

# Wheel and sdist, built, installed in an empty environment and used there.
release: $(READY)
	$(BIN)/python benchmarks/release.py

# torch comes first and by itself, so that no other package decides which build is taken.
$(READY): constraints.txt pyproject.toml setup.py $(wildcard src/platon/deploy/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lab,export,lightning,cluster,docs,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
