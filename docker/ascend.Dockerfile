# The image for Ascend NPUs. Its base image of CANN must be made for the chip of the host: 910b, a3 or 310p.
#   docker build -f docker/ascend.Dockerfile -t nanochat-ascend .
#   docker build -f docker/ascend.Dockerfile --build-arg BASE=ascend/cann:9.0.0-a3-ubuntu22.04-py3.11 -t nanochat-ascend .
# A container uses the driver of the host: README_ASCEND.md has the flags of `docker run` that mount the driver.
# To use a package mirror, build with --build-arg PIP_INDEX_URL=URL. A tag of the base image may change; to pin it, give
# the digest that your registry shows: --build-arg BASE=ascend/cann:9.0.0-910b-ubuntu22.04-py3.11@sha256:DIGEST.
# The image runs as the user nanochat, uid 1001 or --build-arg USER_ID. Its groups must include the host's HwHiAiUser:
# docker run --group-add "$(getent group HwHiAiUser | cut -d: -f3)". A folder that you mount at /data must be writable
# for this user. /opt/nanochat.packages lists the versions of the system's packages.
ARG BASE=ascend/cann:9.0.0-910b-ubuntu22.04-py3.11
FROM ${BASE}
USER root
ARG USER_ID=1001
RUN (dpkg-query --show || rpm -qa) >/opt/nanochat.packages && \
    useradd --create-home --non-unique --uid "$USER_ID" nanochat && \
    install -d -o nanochat /opt/nanochat /data
WORKDIR /opt/nanochat
COPY --chown=nanochat . .
USER nanochat
ARG PIP_INDEX_URL
# The build of an image sees no card, so set-up warns that torch_npu cannot be loaded yet.
RUN bash setup_ascend.sh && rm -rf /home/nanochat/.cache
ENV PATH=/opt/nanochat/.venv/bin:$PATH NANOCHAT_BASE_DIR=/data
VOLUME /data
EXPOSE 8000
CMD ["bash", "speedrun_npu.sh"]
