# The images of the services: the targets `gateway`, `scheduler`, `worker` (CPU) and `worker-cuda`.
#
# Dependencies come before code, so that a change of code copies one small layer. Only the build
# stages see pip and the package index; BUILD_IMAGE may bring wheels and a pip configuration.
# Needs no BuildKit.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=python:3.11-slim

# What to install, as lists: a pyproject.toml that asks for the same installs nothing anew.
FROM ${BUILD_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml scripts/requirements.py ./
RUN for name in build-system gateway scheduler worker; do \
    python3 requirements.py $name >$name.txt || exit 1; done \
  # Triton compiles kernels for GPUs alone, and is larger than everything else together.
  && grep -v ^triton worker.txt >worker-cpu.txt

FROM ${BUILD_IMAGE} AS build
# pip's own variables; empty ones are ignored.
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/quire
WORKDIR /src

# The distribution itself, without its dependencies, in /app. Its environment has the path of the
# final ones, which scripts name in their first line.
FROM build AS app
COPY --from=requirements /requirements/build-system.txt .
RUN /opt/quire/bin/pip install --quiet wheel -r build-system.txt
COPY . .
RUN /opt/quire/bin/pip install --quiet --no-deps --no-build-isolation --target /app .

# What every image has: the interpreter, a user without rights, the paths.
FROM ${BASE_IMAGE} AS base
# The hub's cache is there for volumes to be mounted on: they take its owner.
RUN useradd --uid 10001 --create-home quire \
  && install --directory --owner=quire --group=quire /home/quire/.cache/huggingface
ENV PATH=/app/bin:/opt/quire/bin:$PATH \
  PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/quire
STOPSIGNAL SIGTERM

FROM build AS gateway-dependencies
COPY --from=requirements /requirements/gateway.txt .
RUN /opt/quire/bin/pip install --quiet -r gateway.txt \
  && /opt/quire/bin/pip uninstall --quiet --yes pip setuptools

FROM base AS gateway
COPY --from=gateway-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_GATEWAY_LISTEN=0.0.0.0:50051
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["quire", "health", "--target", "127.0.0.1:50051", "--service", ""]
ENTRYPOINT ["python", "-m", "gateway_svc"]

FROM build AS scheduler-dependencies
COPY --from=requirements /requirements/scheduler.txt .
RUN /opt/quire/bin/pip install --quiet -r scheduler.txt \
  && /opt/quire/bin/pip uninstall --quiet --yes pip setuptools

FROM base AS scheduler
COPY --from=scheduler-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_SCHEDULER_LISTEN=0.0.0.0:50052
EXPOSE 50052
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["quire", "health", "--target", "127.0.0.1:50052", "--service", ""]
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM build AS worker-dependencies
ARG TORCH=torch
# The address of PyTorch's index of CPU wheels; empty takes torch from the ordinary index, whose
# build brings gigabytes for GPUs.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/worker-cpu.txt .
# Bytecode is made of what a worker imports, not of the thousands of modules that it does not.
RUN /opt/quire/bin/pip install --quiet --no-compile \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
  && /opt/quire/bin/pip install --quiet --no-compile -r worker-cpu.txt \
  && /opt/quire/bin/python -c 'from transformers import AutoModelForCausalLM, LlamaForCausalLM' \
  && /opt/quire/bin/pip uninstall --quiet --yes pip

# The C++ kernels, in versions for several instruction sets, of which a worker chooses when it runs.
FROM worker-dependencies AS worker-kernels
RUN command -v g++ || { apt-get update && apt-get install --yes --no-install-recommends g++; }
COPY --from=app /app/kernels ./kernels
RUN QUIRE_KERNEL_CACHE=/opt/quire-kernels /opt/quire/bin/python -m kernels.cpu.build

FROM base AS worker
COPY --from=worker-dependencies /opt/quire /opt/quire
COPY --from=worker-kernels /opt/quire-kernels /opt/quire-kernels
COPY --from=app /app /app
USER quire
ENV QUIRE_WORKER_LISTEN=0.0.0.0:50053 QUIRE_KERNEL_CACHE=/opt/quire-kernels
EXPOSE 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
  CMD ["quire", "health", "--target", "127.0.0.1:50053", "--service", ""]
ENTRYPOINT ["python", "-m", "worker_svc"]

# For NVIDIA GPUs. Written beside the others, but not built by the tests, which have neither a GPU
# nor gigabytes to fetch; it comes last, so that no other target builds it.
FROM build AS worker-cuda-dependencies
ARG TORCH=torch
# The address of PyTorch's index for an older version of CUDA; empty takes the ordinary index.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/worker.txt .
RUN /opt/quire/bin/pip install --quiet --no-compile \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
  && /opt/quire/bin/pip install --quiet --no-compile -r worker.txt \
  && /opt/quire/bin/python -c 'from transformers import AutoModelForCausalLM, LlamaForCausalLM' \
  && /opt/quire/bin/pip uninstall --quiet --yes pip

FROM base AS worker-cuda
# The one image with a compiler: Triton needs it when a kernel is first launched, and torch to
# compile a model.
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ libc6-dev \
  && rm -rf /var/lib/apt/lists/* \
  # For volumes, which take their owner.
  && install --directory --owner=quire --group=quire /home/quire/.gpu-locks /home/quire/.compiled
COPY --from=worker-cuda-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_WORKER_LISTEN=0.0.0.0:50053 QUIRE_WORKER_DEVICE=cuda \
  TRITON_CACHE_DIR=/home/quire/.compiled/triton \
  TORCHINDUCTOR_CACHE_DIR=/home/quire/.compiled/torch \
  NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
  CMD ["quire", "health", "--target", "127.0.0.1:50053", "--service", ""]
ENTRYPOINT ["python", "-m", "worker_svc"]
