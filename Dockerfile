# The image of flow, scheduler and workers, with the versions of infra/locks (docs/decisions/lock-file.md):
#   make image                 # or: docker build -t refrain:cpu .
#   make image DEVICE=gpu      # the host has NVIDIA's driver and container toolkit
#   docker build -t refrain-mlflow --target mlflow .         # MLflow's server, for infra/compose.yaml
# Give PYTHON_IMAGE with a digest (python:3.11-slim-bookworm@sha256:…) to hold the base image too. Where
# packages come from a mirror, say so by PIP_INDEX_URL, UV_INDEX_URL and UV_FIND_LINKS.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# What builds the images, and is in none of them.
FROM ${PYTHON_IMAGE} AS tools
ARG PIP_INDEX_URL
ARG UV_INDEX_URL
ARG UV_FIND_LINKS
ENV UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_HTTP_TIMEOUT=300 UV_SYSTEM_CERTS=1 \
    PATH=$PATH:/opt/tools/bin
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY infra/locks/tools.txt /tmp/tools.txt
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/tools.txt

FROM tools AS mlflow_libraries
COPY infra/locks/mlflow.txt /tmp/lock.txt
RUN uv venv --python "$(command -v python3)" /opt/mlflow \
    && uv pip install --python /opt/mlflow --no-deps --require-hashes -r /tmp/lock.txt \
    && cyclonedx-py environment --output-reproducible -o /opt/mlflow/sbom.cdx.json /opt/mlflow

FROM ${PYTHON_IMAGE} AS mlflow
LABEL org.opencontainers.image.title="refrain-mlflow" \
      org.opencontainers.image.description="MLflow's server with what Postgres and S3 take" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=mlflow_libraries /opt/mlflow /opt/mlflow
ENV PATH=/opt/mlflow/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 mlflow
USER 1000
WORKDIR /home/mlflow
HEALTHCHECK --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:5000/health', timeout=10)"]

FROM tools AS libraries
ARG DEVICE=cpu
# torch for a CPU is in PyTorch's own index, which this adds for torch alone; empty where UV_FIND_LINKS
# or UV_INDEX_URL has it.
ARG TORCH_BACKEND=cpu
ARG UV_INDEX_URL
ARG UV_FIND_LINKS
COPY infra/locks/${DEVICE}.txt /tmp/lock.txt
# Debug symbols and the libraries' own tests are four hundred MB that no run reads.
# hadolint ignore=DL3003
RUN if [ "${DEVICE}" = cpu ] && [ -n "${TORCH_BACKEND}" ]; then set -- --torch-backend "${TORCH_BACKEND}"; fi \
    && uv venv --python "$(command -v python3)" /opt/refrain \
    && uv pip install --python /opt/refrain --no-deps --require-hashes --build-constraints /tmp/lock.txt \
        "$@" -r /tmp/lock.txt \
    && cd /opt/refrain/lib/python3*/site-packages \
    && strip --strip-debug vllm/*.so \
    && rm -rf torch/test torch/bin/test_* numba/tests numba/cuda/tests numpy/_core/tests pyarrow/tests \
        scipy/*/tests scipy/*/*/tests sklearn/*/tests sympy/*/tests matplotlib/tests

FROM libraries AS package
COPY pyproject.toml README.md LICENSE /src/
COPY configs /src/configs
COPY engines /src/engines
COPY flows /src/flows
COPY infra /src/infra
COPY storage /src/storage
COPY tasks /src/tasks
RUN uv build --wheel --python /opt/refrain --no-build-isolation --out-dir /dist /src \
    && uv pip install --python /opt/refrain --no-deps /dist/*.whl \
    && cyclonedx-py environment --output-reproducible -o /dist/sbom.cdx.json /opt/refrain

FROM ${PYTHON_IMAGE} AS refrain
# vLLM's CPU build links to libnuma; Triton and torch.compile call a compiler while a run goes;
# cluster.kind = ssh calls ssh.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 refrain
COPY --from=libraries /opt/refrain /opt/refrain
COPY --from=package /dist /opt/refrain/dist
RUN pip --python /opt/refrain/bin/python install --no-deps --no-index --no-cache-dir /opt/refrain/dist/*.whl
ENV PATH=/opt/refrain/bin:$PATH PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
# A run's .refrain is here, where the settings name no other place: mount a volume on it.
WORKDIR /home/refrain
RUN mkdir .refrain
# `refrain health` says what is looked at. Kubernetes has probes of its own (docs/operations.md).
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=5 CMD ["refrain", "health"]
# Last, since they differ with every commit. `make image` gives them.
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="refrain" \
      org.opencontainers.image.description="Reinforcement-learning post-training of language models as a Prefect pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
CMD ["refrain", "--help"]
