# demo and test set up .venv themselves. gpu-test uses a Python that has torch and installs nothing.
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= python3
JOBS ?= 1

.PHONY: demo test check wheel soak golden gpu-test bench-scheduler bench-front-end venv clean

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
	LOCKSTEP_SOAK_ROUNDS=20 $(BIN)/pytest tests/launcher/test_serve_clients.py \
	  tests/launcher/test_serve_memory.py -k "dropped or memory" --durations=5 -rP
	LOCKSTEP_SOAK_WAVES=25 $(BIN)/pytest -s tests/launcher/test_many_streams.py
	LOCKSTEP_SOAK_STOPS=1 LOCKSTEP_SOAK_IDLE_S=600 $(BIN)/pytest -s tests/launcher/test_serve_stops.py

wheel: venv
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

golden: venv
	$(BIN)/python tests/golden.py --report docs/golden.md --jobs $(JOBS)

gpu-test:
	PYTHONPATH=deploy/package $(PYTHON) -P -m pytest -m "gpu or multigpu" -rs

bench-scheduler: venv
	$(BIN)/python tests/bench_scheduler.py

bench-front-end: venv
	$(BIN)/python tests/bench_front_end.py

venv:
	@deploy/setup_venv.sh

clean:
	rm -rf .venv build dist *.egg-info deploy/package/*.egg-info
