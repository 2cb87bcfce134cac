# A machine with NVIDIA GPUs: docker build -t syncopate-jax . && docker run --gpus all syncopate-jax
# The base image, not runtime or devel: CUDA's libraries and ptxas come with jax[cuda13], and a second
# copy under /usr/local/cuda, found first, would be an older one.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

ARG PYTHON_VERSION=3.12
ARG JAX_VERSION=0.12.0.1

# g++ builds the copy-engine handlers at first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ "python${PYTHON_VERSION}" "python${PYTHON_VERSION}-venv" \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1001 --user-group --create-home --shell /bin/bash syncopate \
    && install -d -o syncopate -g syncopate /opt/venv /opt/syncopate

# By number: a cluster that forbids root cannot look a name up.
USER 1001
WORKDIR /opt/syncopate
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1

# JAX first: its gigabytes stay in a layer of their own when only the sources change.
RUN "python${PYTHON_VERSION}" -m venv /opt/venv \
    && pip install "jax[cuda13]==${JAX_VERSION}" "jaxlib==${JAX_VERSION}"

COPY --chown=1001:1001 . .
# The rule asks for versions; the first requirement is this source itself.
# hadolint ignore=DL3013
RUN pip install ".[cuda13,triton,viz]" "jax==${JAX_VERSION}" "jaxlib==${JAX_VERSION}"

WORKDIR /home/syncopate
ENTRYPOINT ["python", "-m", "syncopate_jax"]
CMD ["doctor"]
