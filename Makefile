# Two commands do all the set-up on a machine with python3 and make:
#   make run    the demo: real Envoy, the router, eight emulated vLLM workers
#   make test   every test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test soak fuzz test-engine check format compose-test pictures proto lock clean help
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "extproc needs Python 3.11 or newer, this is %d.%d: set PYTHON=python3.12 or the like" % v[:2])'
	@echo "Setting up $(VENV) (locked versions, hashes checked) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

run: $(STAMP) ## real Envoy + router + emulated workers: round robin against prefix affinity
	@$(BIN)/extproc demo $(ARGS)

test: $(STAMP) ## all tests (ARGS="-k name" to choose)
	$(BIN)/python -m pytest $(ARGS)

REQUESTS ?= 10000
RUNS     ?= 1
soak: $(STAMP) ## mixed requests while Envoy and the router die: REQUESTS=10000 RUNS=5, or SECONDS=3600
	$(BIN)/python tests/e2e/soak.py $(if $(SECONDS),--seconds $(SECONDS),--requests $(REQUESTS) --runs $(RUNS)) $(ARGS)

CASES ?= 1000000
fuzz: $(STAMP) ## random bodies and messages: CASES=1000000 SEED=1
	$(BIN)/python tests/fuzz/fuzz.py --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-engine: $(STAMP) ## against a real vLLM: VLLM=/path/to/vllm MODEL=/path/to/small-model
	$(BIN)/python -m pytest tests/engine -m engine $(ARGS)

check: $(STAMP) ## linter, formatter, strict types, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check

format: $(STAMP) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compose-test: $(STAMP) ## docker-compose.yml, really run (needs a Docker engine)
	$(BIN)/python tests/compose/check.py

pictures: $(STAMP) ## the page's pictures for the docs, from twelve minutes of traffic (needs Chromium)
	PYTHONPATH=tests $(BIN)/python tests/e2e/pictures.py docs $(ARGS)

proto: $(STAMP) ## generate extproc/wire/ from proto/
	$(BIN)/python proto/generate.py

LOCK := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11

lock: ## choose versions anew and write requirements*.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(LOCK) --upgrade --extra local --extra dev pyproject.toml --output-file requirements.lock
	$(LOCK) --constraint requirements.lock --extra tracing pyproject.toml --output-file requirements-serve.lock
	$(LOCK) --constraint requirements.lock --extra local pyproject.toml --output-file requirements-local.lock

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
