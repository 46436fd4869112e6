# The image of flow, scheduler and workers, with the versions of infra/locks (docs/decisions/lock-file.md):
#   docker build -t refrain:cpu .
#   docker build -t refrain:gpu --build-arg DEVICE=gpu .     # the host has NVIDIA's driver and container toolkit
#   docker build -t refrain-mlflow --target mlflow .         # MLflow's server, for infra/compose.yaml
# Give PYTHON_IMAGE with a digest (python:3.11-slim-bookworm@sha256:…) to hold the base image too.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_HTTP_TIMEOUT=300 \
    PYTHONUNBUFFERED=1
RUN pip install --no-cache-dir uv==0.13.9

FROM base AS mlflow
COPY infra/locks/mlflow.txt /tmp/lock.txt
RUN uv pip install --no-deps --require-hashes -r /tmp/lock.txt && useradd --create-home --uid 1000 mlflow
USER 1000
WORKDIR /home/mlflow

FROM base AS refrain
ARG DEVICE=cpu
# vLLM's CPU build links to libnuma; Triton and torch.compile call a compiler while a run goes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY infra/locks/${DEVICE}.txt /tmp/lock.txt
# torch for a CPU is in PyTorch's own index, which this option adds for torch alone.
RUN if [ "${DEVICE}" = cpu ]; then set -- --torch-backend cpu; fi \
    && uv pip install --no-deps --require-hashes --build-constraints /tmp/lock.txt "$@" -r /tmp/lock.txt
COPY pyproject.toml README.md LICENSE /src/
COPY configs /src/configs
COPY engines /src/engines
COPY flows /src/flows
COPY infra /src/infra
COPY storage /src/storage
COPY tasks /src/tasks
RUN uv pip install --no-deps --no-build-isolation /src && useradd --create-home --uid 1000 refrain
USER 1000
# A run's .refrain is here, where the settings name no other place: mount a volume on it.
WORKDIR /home/refrain
RUN mkdir .refrain
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["refrain", "--help"]
