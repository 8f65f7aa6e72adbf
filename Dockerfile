# The image for CPUs and NVIDIA GPUs. Dockerfile.ascend makes the image for NPUs.
#   docker build -t nanochat .
#   docker run --rm -it -v nanochat:/data nanochat                                   run the pipeline on a CPU
#   docker run --rm -it --gpus all --ipc host -v nanochat:/data nanochat             run the pipeline on GPUs
#   docker run --rm -it -p 127.0.0.1:8000:8000 -v nanochat:/data nanochat \
#     python -m scripts.chat_web --host 0.0.0.0                                      chat with the trained model
# To use a package mirror, build with --build-arg PIP_INDEX_URL=URL. A tag of the base image may change; to pin it, give
# the digest that your registry shows: --build-arg BASE=python:3.11-slim-bookworm@sha256:DIGEST.
# The image runs as the user nanochat; a folder that you mount at /data must be writable for the uid 1000 (or that of
# --build-arg USER_ID). /opt/nanochat.packages lists the versions of the system's packages.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG USER_ID=1000
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/* && \
    dpkg-query --show >/opt/nanochat.packages && \
    useradd --create-home --non-unique --uid "$USER_ID" nanochat && \
    install -d -o nanochat /opt/nanochat /data
WORKDIR /opt/nanochat
COPY --chown=nanochat . .
USER nanochat
ARG PIP_INDEX_URL
RUN bash setup_env.sh && rm -rf /home/nanochat/.cache
ENV PATH=/opt/nanochat/.venv/bin:$PATH NANOCHAT_BASE_DIR=/data
VOLUME /data
EXPOSE 8000
CMD ["bash", "speedrun.sh"]
