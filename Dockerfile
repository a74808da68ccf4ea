# Two images from one file:
#   docker build --target serve -t envoy-prefix-router .        the router; the default
#   docker build --target local -t envoy-prefix-router:local .  with the emulated worker and the demo
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# Without pip inside: what runs doesn't install.
RUN python3 -m venv --without-pip /opt/extproc
# Dependencies first: they change less often than the code.
COPY requirements-serve.lock ./
RUN python3 -m pip --python /opt/extproc install --require-hashes -r requirements-serve.lock
COPY pyproject.toml README.md LICENSE ./
COPY extproc extproc
# Parts of the wheel: the demo starts from the files that users copy.
COPY envoy/envoy.yaml envoy/cluster-per-worker.yaml envoy/
RUN python3 -m pip --python /opt/extproc install --no-deps .

FROM build AS build-local
COPY requirements-local.lock ./
RUN python3 -m pip --python /opt/extproc install --require-hashes -r requirements-local.lock

FROM ${PYTHON_IMAGE} AS base
# A numeric user, so that Kubernetes can see that it isn't root. Nothing is written at run time: the root file
# system may be read-only.
RUN groupadd --gid 10001 extproc && useradd --uid 10001 --gid 10001 --no-create-home extproc
ENV PATH=/opt/extproc/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
USER 10001:10001
ENTRYPOINT ["extproc"]

FROM base AS local
COPY --from=build-local /opt/extproc /opt/extproc
CMD ["worker", "--host", "0.0.0.0", "--port", "8000"]
EXPOSE 8000

# Last, so that it is what `docker build .` makes.
FROM base AS serve
COPY --from=build /opt/extproc /opt/extproc
CMD ["serve", "--envoy-config", "/etc/extproc/envoy.yaml", "--listen", "0.0.0.0:50051", "--metrics", "0.0.0.0:9090"]
EXPOSE 50051 9090
# Patient: on a busy machine a Python program takes seconds to start.
HEALTHCHECK --interval=5s --timeout=10s --start-period=60s CMD ["extproc", "health", "--target", "127.0.0.1:50051"]
