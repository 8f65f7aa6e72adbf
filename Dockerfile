# The image for CPUs and NVIDIA GPUs. Dockerfile.ascend makes the image for NPUs.
#   docker build -t nanochat .
#   docker run --rm -it -v nanochat:/data nanochat                                   run the pipeline on a CPU
#   docker run --rm -it --gpus all --ipc host -v nanochat:/data nanochat             run the pipeline on GPUs
#   docker run --rm -it -p 127.0.0.1:8000:8000 -v nanochat:/data nanochat \
#     python -m scripts.chat_web --host 0.0.0.0                                      chat with the trained model
# To use a package mirror, build with --build-arg PIP_INDEX_URL=URL.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nanochat
COPY . .
ARG PIP_INDEX_URL
RUN bash setup_env.sh
ENV PATH=/opt/nanochat/.venv/bin:$PATH NANOCHAT_BASE_DIR=/data
VOLUME /data
EXPOSE 8000
CMD ["bash", "speedrun.sh"]
