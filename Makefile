# Every target sets up .venv by itself; the second time that costs a few milliseconds (ci/setup.sh).
# ARGS passes options on: make serve ARGS="--port 8001", make test ARGS="tests/server -k stream".

PY := .venv/bin/python
ARGS ?=
PEERS ?=
MINUTES ?= 10
# Several test processes share the cores, so each of them computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal --durations=10

.DEFAULT_GOAL := help
.PHONY: help setup serve test full hunt bench peers check readme clients lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv ready; every target does this first (serve: only for serving)
	@PYTHON="$(PYTHON)" sh ci/setup.sh

serve:  ## answer HTTP on 127.0.0.1:8000 with the default model
	@PYTHON="$(PYTHON)" sh ci/setup.sh serve
	@exec $(PY) -m server $(ARGS)

test: setup  ## all tests but the slow ones, and the property gate
	@LOCKSTEP_PROFILE=gate $(PYTEST) -m "not slow" $(ARGS)

full: setup  ## every test, the slow ones too
	@LOCKSTEP_PROFILE=gate $(PYTEST) $(ARGS)

hunt: setup  ## look for new differences between engine and specification for MINUTES=10
	@exec $(PY) -m properties hunt --minutes $(MINUTES) $(ARGS)

bench: setup  ## measure this engine beside the peers, offline, in one table (make peers first)
	@exec $(PY) -m server bench --offline $(ARGS)

peers: setup  ## install the engines that bench measures beside this one, each in .peers/NAME
	@exec $(PY) -m ci.peers $(PEERS) $(ARGS)

check: setup  ## lint, formatting, types and import contracts
	@sh ci/check.sh

readme: setup  ## run the commands of README.md
	@$(PY) ci/readme_commands.py

clients: setup  ## install the clients of other projects that tests/clients drives, apart from .venv
	@sh ci/clients.sh

lock: setup  ## write ci/constraints.txt anew (ARGS=--upgrade for newest versions)
	@sh ci/lock.sh $(ARGS)

clean:  ## remove .venv and every cache; found workloads stay
	rm -rf .venv .clients .setup.lock .clients.lock .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
