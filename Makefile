# demo and test set up .venv themselves. gpu-test uses a Python that has torch and installs nothing.
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= python3
JOBS ?= 1
# Of ranks: how many, on this CPU.
RANKS ?= 8
# Of soak: rounds of dropped clients, thousands of streams, seconds at rest.
ROUNDS ?= 20
WAVES ?= 25
IDLE_S ?= 600
SOAKS := $(addprefix tests/launcher/,\
  test_serve_clients.py::test_fault_84_clients_dropped_at_random test_serve_memory.py \
  test_many_streams.py test_serve_stops.py test_serve_process.py)

.PHONY: demo test check wheel soak golden ranks gpu-test venv clean
.PHONY: bench-scheduler bench-front-end bench-served scale-run

demo: venv
	$(BIN)/lockstep generate --model smollm2 --tensor-parallel-size 2 --temperature 0 \
	  "What is the capital of France?" "List three primary colours."

test: venv
	$(BIN)/pytest

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: venv
	mkdir -p build
	set -o pipefail; LOCKSTEP_SOAK_STOPS=1 LOCKSTEP_SOAK_ROUNDS=$(ROUNDS) \
	  LOCKSTEP_SOAK_WAVES=$(WAVES) LOCKSTEP_SOAK_IDLE_S=$(IDLE_S) \
	  $(BIN)/pytest -sv --durations=0 --durations-min=1 $(SOAKS) 2>&1 | tee build/soak.txt

wheel: venv
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

golden: venv
	$(BIN)/python tests/golden.py --report docs/golden.md --jobs $(JOBS)

ranks: venv
	mkdir -p build
	set -o pipefail; LOCKSTEP_TEST_RANKS=$(RANKS) $(BIN)/pytest -v --durations=0 \
	  --durations-min=1 tests/worker/test_layouts.py tests/launcher/test_killed_rank.py \
	  tests/launcher/test_golden_ranks.py 2>&1 \
	  | tee build/ranks.txt

gpu-test:
	PYTHONPATH=deploy/package$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(PYTHON) -P -m pytest -m "gpu or multigpu" -rs

bench-scheduler: venv
	$(BIN)/python tests/bench_scheduler.py

bench-front-end: venv
	$(BIN)/python tests/bench_front_end.py

bench-served:
	PYTHONPATH=deploy/package $(PYTHON) -P tests/bench_served.py \
	  --model tests/data/models/llama-3.1-8b

scale-run:
	PYTHONPATH=deploy/package$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) tests/scale_run.py \
	  --out build/scale

venv:
	@deploy/setup_venv.sh

clean:
	rm -rf .venv build dist *.egg-info deploy/package/*.egg-info
