# evalgate in a container: the command, the server and the quantization libraries, without the demo model.
#
#   docker build --target cpu -t evalgate .
#   docker build --target cuda -t evalgate:cuda .
#   docker run --rm -v "$PWD:/work" -v evalgate-cache:/cache evalgate kl --ref ./ckpt --cand model.gguf --data texts/
#   docker run --rm --gpus all -p 8000:8000 -e EVALGATE_API_KEY -v "$PWD:/work" evalgate:cuda serve ./ckpt --host 0.0.0.0
#
# Everything is pinned by constraints.txt, as in `make`. The CUDA image brings CUDA in torch's own packages: the host needs
# NVIDIA's driver and container toolkit, no CUDA.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml MANIFEST.in LICENSE README.md ./
COPY docs/pypi.md docs/
COPY evalgate evalgate
COPY serve serve
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS base
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="evalgate" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 EVALGATE_CACHE=/cache HF_HOME=/cache/hub
# libgomp: what the kernels of torch and llama.cpp run their threads with
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels

FROM base AS cpu-packages
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX}" "torch==${TORCH}"
RUN set -- /wheels/*.whl && pip install -c /tmp/constraints.txt "$1[serve,gguf,quant]"

FROM base AS cuda-packages
ARG TORCH=2.13.0
RUN pip install -c /tmp/constraints.txt "torch==${TORCH}"
RUN set -- /wheels/*.whl && pip install -c /tmp/constraints.txt "$1[serve,gguf,quant]"

# `docker build` without --target builds the last stage
FROM cuda-packages AS cuda
RUN useradd --create-home evalgate && install -d -o evalgate /cache /work
USER evalgate
WORKDIR /work
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["evalgate"]
CMD ["--help"]

FROM cpu-packages AS cpu
RUN useradd --create-home evalgate && install -d -o evalgate /cache /work
USER evalgate
WORKDIR /work
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["evalgate"]
CMD ["--help"]
