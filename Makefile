# The two commands of the README are `make demo` and `make test`; everything they need ends up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PROTOS := $(wildcard proto/ravnest/v1/*.proto)

.PHONY: demo test check fuzz cuts chaos kills soak bench format proto screenshot clean $(VENV)

demo: $(VENV)
	@$(BIN)/ravnest train examples/digits/job.py --providers 3

test: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests

check: $(VENV)/.dev-installed
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.house

# Every decoder of foreign bytes against what a coverage-guided fuzzer makes of valid inputs, and random graphs over every
# allowed operator (GRAPHS=N of them); a few minutes.
fuzz: $(VENV)/.fuzz-installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.graphs --graphs $(or $(GRAPHS),20000)

# Every way to cut 300 random graphs, or GRAPHS=N, against each graph in one piece; a few minutes. SEED=N begins with another.
cuts: $(VENV)/.dev-installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.cuts --graphs $(or $(GRAPHS),300) $(if $(SEED),--seed $(SEED))

# A whole run killed 20 times at random moments and continued each time, other moments each time; a few minutes.
kills: $(VENV)/.dev-installed
	@OMP_NUM_THREADS=1 RAVNEST_KILLS=20 RAVNEST_KILLS_SEED=$${RAVNEST_KILLS_SEED:-$$(date +%s)} \
		$(BIN)/python -m pytest -s tests/e2e/test_killed_runs.py

# Trains for two hours, or MINUTES=N, and fails when any process has grown meanwhile; on a machine that does nothing else.
soak: $(VENV)/.dev-installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(or $(MINUTES),120)

# Faults on purpose, for half an hour or MINUTES=N; SEED=N repeats what a failure named.
chaos: $(VENV)/.dev-installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

# On a machine that does nothing else; an hour.
bench: $(VENV)/.dev-installed
	@$(BIN)/python -m benchmarks.overhead
	@$(BIN)/python -m benchmarks.memory
	@$(BIN)/python -m benchmarks.scale
	@$(BIN)/python -m benchmarks.update
	@$(BIN)/python -m benchmarks.transport
	@$(BIN)/python -m benchmarks.planner
	@$(BIN)/python -m benchmarks.averaging
	@$(BIN)/python -m benchmarks.pipeline
	@$(BIN)/python -m benchmarks.recovery
	@$(BIN)/python -m benchmarks.coded_state

format: $(VENV)/.dev-installed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(VENV)
	@$(BIN)/python proto/generate.py

screenshot: $(VENV)
	@$(BIN)/python docs/make_screenshot.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f ravnest/net/v1/*_pb2.py ravnest/net/v1/*_pb2.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV): $(VENV)/.installed

# The stamps are touched last, so that an interrupted installation is taken up again by the next call.
$(VENV)/.installed: requirements.lock pyproject.toml setup.py proto/generate.py $(PROTOS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Ravnest needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'Installing the pinned dependencies into $(VENV) (once; a few minutes on a slow connection)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.dev-installed: requirements-dev.lock $(VENV)/.installed
	@echo 'Installing what the tests need into $(VENV)'
	@$(PIP) install -r requirements-dev.lock
	@touch $@

$(VENV)/.fuzz-installed: requirements-fuzz.lock $(VENV)/.installed
	@echo 'Installing the fuzzer into $(VENV)'
	@$(PIP) install -r requirements-fuzz.lock
	@touch $@
