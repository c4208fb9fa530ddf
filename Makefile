# Every target works as the first command in a fresh clone; `setup` runs again only when its inputs change.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
SOURCES := mmprefill encoders pipeline

.DEFAULT_GOAL := help
.PHONY: help setup browser run test unit check lint types bench gpu-check clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## virtual environment with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("transformers 5.24 needs Python 3.11: make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing into $(VENV) (torch is large: minutes, once)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ && echo "setup: ready"

browser:  ## Chromium for the demo's tests, from Debian or Ubuntu as root; without it they are skipped
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		echo "browser: installing chromium"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium fonts-dejavu-core >/dev/null; \
	}

run: $(STAMP)  ## the main job on samples/
	@$(VENV)/bin/mmprefill run --requests samples/requests.jsonl --generate 16

TESTS := -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: $(STAMP)  ## the tests
	@$(PY) $(TESTS)

unit: $(STAMP)  ## those that need no process of their own and no browser
	@$(PY) $(TESTS) -m "not end_to_end"

check: lint types  ## ruff, and mypy --strict on the built wheel

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(STAMP)  # on the wheel, apart from the checkout: an editable install hides the mapped folders from mypy
	@rm -rf build/types build/lib build/bdist.* && mkdir -p build/types
	@$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/types .
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target build/types/site build/types/*.whl
	@cd build/types/site && $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p mmprefill  # with mmprefill.encoders and .pipeline, which lie inside it

bench: $(STAMP)  ## throughput beside transformers, on both shapes of benchmarks/shapes.py; BENCH="--requests 8" for less
	@for shape in smolvlm-256m qwen2.5-vl-500m; do \
		test -d build/shapes/$$shape || $(PY) benchmarks/shapes.py $$shape build/shapes/$$shape || exit 1; \
		table=benchmarks/bench_$$shape.md; echo "bench: $$shape, into $$table"; \
		$(VENV)/bin/mmprefill bench prefill build/shapes/$$shape $(BENCH) > build/bench.md || exit 1; \
		mv build/bench.md $$table && cat $$table; \
	done

gpu-check:  ## everything that needs CUDA, in the environment at hand: PYTHON=... chooses it
	@$(PYTHON) benchmarks/gpu_check.py

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
