# The server: no torch, no root. Build from the root of the tree:
#   docker build -f docker/server.Dockerfile -t anabranch-server .
# Its data lies on the volume; `anabranch init` has written ./model (docs/deploying.md):
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     -v anabranch:/var/lib/anabranch -v "$PWD/model:/model:ro" -p 7070:7070 -p 7072:7072 \
#     anabranch-server --model /model
# A volume at /backup is this user's as well, for copies of the data.
# It wants an authority first, on the same volume: `anabranch admin ca init` in this image (docs/deploying.md).
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# 1: install from docker/wheels alone, for a machine without a network.
ARG PIP_NO_INDEX=
ARG EXTRAS=server,postgresql,blake3
COPY docker/wheels /wheels
COPY . /src
RUN python3 -m venv /opt/anabranch \
 && /opt/anabranch/bin/pip install --no-cache-dir --find-links /wheels "/src[${EXTRAS}]"

FROM ${BASE}
LABEL org.opencontainers.image.title="anabranch-server" \
      org.opencontainers.image.description="Asynchronous federated learning: the server" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/anabranch /opt/anabranch
# A new volume is as empty as its folder here: a home that is made by useradd has a shell's files in it.
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/anabranch --no-create-home anabranch \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/anabranch /backup
# Two allocator arenas: dozens of threads would otherwise each keep memory that another one freed.
# The operators' port stays on the container's own loopback: `docker exec ... anabranch admin status`.
ENV PATH=/opt/anabranch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    ANABRANCH_SERVER_ADDRESS=0.0.0.0:7070 \
    ANABRANCH_IDENTITY_FOLDER=/var/lib/anabranch/identity \
    ANABRANCH_SERVER_DATA_DIR=/var/lib/anabranch
USER 10001:10001
WORKDIR /var/lib/anabranch
VOLUME /var/lib/anabranch
EXPOSE 7070 7072
STOPSIGNAL SIGTERM
# The operators' port: it is plain on loopback, whereas the devices' wants a certificate.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
  CMD ["anabranch", "health", "127.0.0.1:7071"]
ENTRYPOINT ["anabranch", "server"]
