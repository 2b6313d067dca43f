# `make demo` and `make test` do everything on a machine with Python 3.11+, make and a C compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
DEMO_WINDOWS ?= 18
SOAK_SECONDS ?= 600
SIZE ?= quick

.PHONY: demo test suite check docs quick quick-tests format fuzz reports formats presets release soak bench bench-check clean

# torch first, pinned: unpinned it would bring several GB of CUDA
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip uninstall -q -y evalgate 2> /dev/null  # the name of the distribution before evalgate-lm
	rm -rf evalgate.egg-info
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[serve,demo,gguf]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[serve,demo,gguf,notebook,dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/evalgate kl --ref demo --cand demo@int8 --limit $(DEMO_WINDOWS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build -q

# the documentation as a site of its own in site/: open site/index.html
docs: $(VENV)/.ready-dev
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build -q

# side by side: mypy without its cache takes as long as many tests
test: $(VENV)/.ready-dev
	$(MAKE) -j 2 check suite

# one thread a process: two workers fill two cores without fighting over them. Each takes half of the tests in their
# order, so that a file shares what it has loaded, and then from the other's half
suite: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist worksteal

# the checks and the tests of what changed, in about a minute; see tests/quick.py
quick: $(VENV)/.ready-dev
	$(MAKE) -j 2 check quick-tests

quick-tests: $(VENV)/.ready-dev
	$(RUN) tests.quick

# the property tests on examples that nobody has tried yet: `make test` tries the same ones every time
fuzz: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist worksteal -m hypothesis --hypothesis-profile=new

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reports: $(VENV)/.ready-dev
	$(BIN)/python reports/make_demo.py
	$(BIN)/python reports/make_sweep.py

# every format that loads on a CPU, made by its own library; installs some of them in the cache folder
formats: $(VENV)/.ready-dev
	$(BIN)/python reports/make_formats.py

presets: $(VENV)/.ready
	$(BIN)/python reports/make_presets.py

# the release checklist; publishes nothing. STEPS="--only build --only install" runs a part of it
release: $(VENV)/.ready-dev
	$(BIN)/python tools/release.py $(STEPS)

soak: $(VENV)/.ready
	$(BIN)/python benchmarks/soak.py --seconds $(SOAK_SECONDS)

# every timed benchmark into reports/bench, far longer with SIZE=full. BENCH="start growth" runs
# those alone
bench: $(VENV)/.ready-dev
	$(RUN) benchmarks --size $(SIZE) $(BENCH)

# the results of `make bench` against reports/bench/baseline.json; UPDATE=--update keeps them as the new baseline
bench-check: $(VENV)/.ready-dev
	$(RUN) benchmarks.check $(UPDATE)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
