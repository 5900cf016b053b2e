# The server: no torch, no shell needed, no root. Build from the root of the tree:
#   docker build -f docker/server.Dockerfile -t anabranch-server .
# Run it read-only, with its data on a volume:
#   docker run --read-only --tmpfs /tmp --cap-drop ALL -v anabranch:/var/lib/anabranch anabranch-server
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# 1: install from docker/wheels alone, for a machine without a network.
ARG PIP_NO_INDEX=
COPY docker/wheels /wheels
COPY . /src
RUN python3 -m venv /opt/anabranch \
 && /opt/anabranch/bin/pip install --no-cache-dir --find-links /wheels "/src[server,postgresql]"

FROM ${BASE}
LABEL org.opencontainers.image.title="anabranch-server" \
      org.opencontainers.image.description="Asynchronous federated learning: the server" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/anabranch /opt/anabranch
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/anabranch --create-home anabranch \
 && chmod 0700 /var/lib/anabranch
# Two allocator arenas: dozens of threads would otherwise each keep memory that another one freed.
ENV PATH=/opt/anabranch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    ANABRANCH_SERVER_ADDRESS=0.0.0.0:7070 \
    ANABRANCH_SERVER_DATA_DIR=/var/lib/anabranch
USER 10001:10001
WORKDIR /var/lib/anabranch
VOLUME /var/lib/anabranch
EXPOSE 7070
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
  CMD ["anabranch", "health", "127.0.0.1:7070"]
ENTRYPOINT ["anabranch", "server"]
