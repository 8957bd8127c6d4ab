# The images of the services: one target each, `gateway`, `scheduler` and `worker`.
#
# Dependencies come before code, so that a change of code copies one small layer. Only the build
# stages see pip and the package index; BUILD_IMAGE may bring wheels and a pip configuration.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=python:3.11-slim

# What to install, as lists: a pyproject.toml that asks for the same installs nothing anew.
FROM ${BUILD_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml scripts/requirements.py ./
RUN for name in build-system gateway scheduler worker; do \
  python3 requirements.py $name > $name.txt || exit 1; done

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
RUN useradd --uid 10001 --create-home quire
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
RUN /opt/quire/bin/pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=requirements /requirements/worker.txt .
RUN /opt/quire/bin/pip install --quiet -r worker.txt \
  && /opt/quire/bin/pip uninstall --quiet --yes pip

FROM base AS worker
COPY --from=worker-dependencies /opt/quire /opt/quire
COPY --from=app /app /app
USER quire
ENV QUIRE_WORKER_LISTEN=0.0.0.0:50053
EXPOSE 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s \
  CMD ["quire", "health", "--target", "127.0.0.1:50053", "--service", ""]
ENTRYPOINT ["python", "-m", "worker_svc"]
