# Images of the services: targets `gateway`, `scheduler`, `worker` (CPU) and `worker-cuda`.
#
# Dependencies are installed before the code is copied, so that a change of code replaces one small
# layer. Only the build stages use pip and the package index; BUILD_IMAGE may contain wheels and a pip
# configuration. BuildKit is not required.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=python:3.11-slim
# The only place that pins torch; the Makefile reads it here.
ARG PINNED_TORCH=torch==2.13.0

# Lists of requirements: dependencies are installed again only if these lists change.
FROM ${BUILD_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml scripts/requirements.py ./
RUN for name in build-system worker; do \
    python3 requirements.py $name >$name.txt || exit 1; done \
  # These export traces, if their settings name a receiver.
  && python3 requirements.py gateway tracing >gateway.txt \
  && python3 requirements.py scheduler tracing kubernetes >scheduler.txt \
  # Triton is for GPUs only, and larger than all other packages together.
  && grep -v ^triton worker.txt >worker-cpu.txt

FROM ${BUILD_IMAGE} AS build
# pip's own variables; empty ones are ignored.
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/quire
WORKDIR /src

# The distribution itself, without its dependencies, in /app. The environment has the same path as in
# the final images, because the scripts' first lines contain it.
FROM build AS app
COPY --from=requirements /requirements/build-system.txt .
RUN /opt/quire/bin/pip install --quiet wheel -r build-system.txt
COPY . .
RUN /opt/quire/bin/pip install --quiet --no-deps --no-build-isolation --target /app .

# Common to all images: the interpreter, an unprivileged user, the paths.
FROM ${BASE_IMAGE} AS base
# The mount points of the caches; a new volume takes its owner.
RUN useradd --uid 10001 --create-home quire \
  && install --directory --owner=quire --group=quire /home/quire/.cache/huggingface \
    /home/quire/.cache/quire/weights
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
ENV QUIRE_GATEWAY_LISTEN=0.0.0.0:50051 QUIRE_GATEWAY_HTTP_LISTEN=0.0.0.0:8000 \
  QUIRE_GATEWAY_HEALTH_LISTEN=127.0.0.1:50060
EXPOSE 50051 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["python", "-m", "quire.probe", "127.0.0.1:50060", ""]
ENTRYPOINT ["python", "-m", "gateway_svc"]

FROM build AS scheduler-dependencies
COPY --from=requirements /requirements/scheduler.txt .
RUN /opt/quire/bin/pip install --quiet -r scheduler.txt \
  && /opt/quire/bin/pip uninstall --quiet --yes pip setuptools

FROM base AS scheduler
COPY --from=scheduler-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_SCHEDULER_LISTEN=0.0.0.0:50052 QUIRE_SCHEDULER_HEALTH_LISTEN=127.0.0.1:50060
EXPOSE 50052
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s \
  CMD ["python", "-m", "quire.probe", "127.0.0.1:50060", ""]
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM build AS worker-dependencies
ARG PINNED_TORCH
# Replaces the pinned version unless it is empty.
ARG TORCH=
# URL of PyTorch's index of CPU wheels. Empty: the default index, whose build includes gigabytes of
# GPU libraries.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/worker-cpu.txt .
# Compile only the modules that a worker imports, not the thousands that it does not.
RUN /opt/quire/bin/pip install --quiet --no-compile \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-$PINNED_TORCH}" \
  && /opt/quire/bin/pip install --quiet --no-compile -r worker-cpu.txt \
  && /opt/quire/bin/python -c 'import grpc_health.v1.health_pb2_grpc' \
  && /opt/quire/bin/python -c 'from transformers import AutoModelForCausalLM, LlamaForCausalLM' \
  && /opt/quire/bin/pip uninstall --quiet --yes pip

# The C++ kernels, for several instruction sets; the worker selects one at run time.
FROM worker-dependencies AS worker-kernels
RUN command -v g++ || { apt-get update && apt-get install --yes --no-install-recommends g++; }
COPY --from=app /app/kernels ./kernels
RUN QUIRE_KERNEL_CACHE=/opt/quire-kernels /opt/quire/bin/python -m kernels.cpu.build

FROM base AS worker
COPY --from=worker-dependencies /opt/quire /opt/quire
COPY --from=worker-kernels /opt/quire-kernels /opt/quire-kernels
COPY --from=app /app /app
USER quire
ENV QUIRE_WORKER_LISTEN=0.0.0.0:50053 QUIRE_WORKER_HEALTH_LISTEN=127.0.0.1:50060 \
  QUIRE_KERNEL_CACHE=/opt/quire-kernels
EXPOSE 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
  CMD ["python", "-m", "quire.probe", "127.0.0.1:50060", ""]
ENTRYPOINT ["python", "-m", "worker_svc"]

# For NVIDIA GPUs. Not built by the tests, which have no GPU. It is last, so that the classic builder
# does not build it for other targets.
FROM build AS worker-cuda-dependencies
ARG PINNED_TORCH
# Replaces the pinned version unless it is empty.
ARG TORCH=
# URL of PyTorch's index for an older version of CUDA. Empty: the default index.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/worker.txt .
RUN /opt/quire/bin/pip install --quiet --no-compile \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-$PINNED_TORCH}" \
  && /opt/quire/bin/pip install --quiet --no-compile -r worker.txt \
  && /opt/quire/bin/python -c 'import grpc_health.v1.health_pb2_grpc' \
  && /opt/quire/bin/python -c 'from transformers import AutoModelForCausalLM, LlamaForCausalLM' \
  && /opt/quire/bin/pip uninstall --quiet --yes pip

FROM base AS worker-cuda
# The only image with a compiler: Triton needs it at the first launch of a kernel, and torch to
# compile a model.
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ libc6-dev \
  && rm -rf /var/lib/apt/lists/* \
  # Mount points; new volumes take their owner.
  && install --directory --owner=quire --group=quire /home/quire/.gpu-locks /home/quire/.compiled
COPY --from=worker-cuda-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_WORKER_LISTEN=0.0.0.0:50053 QUIRE_WORKER_HEALTH_LISTEN=127.0.0.1:50060 \
  QUIRE_WORKER_DEVICE=cuda \
  TRITON_CACHE_DIR=/home/quire/.compiled/triton \
  TORCHINDUCTOR_CACHE_DIR=/home/quire/.compiled/torch \
  PYTORCH_KERNEL_CACHE_PATH=/home/quire/.compiled/kernels \
  CUDA_CACHE_PATH=/home/quire/.compiled/cuda \
  NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
  CMD ["python", "-m", "quire.probe", "127.0.0.1:50060", ""]
ENTRYPOINT ["python", "-m", "worker_svc"]
