# A device: the agent, torch and the built-in workloads. Build from the root of the tree:
#   docker build -f docker/client.Dockerfile -t anabranch-client .
# Its name, its key and its outbox lie on the volume, so that they outlive the container:
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     -v device-0:/var/lib/anabranch anabranch-client digits --server HOST:7070 --shard 0/3 \
#     --token TOKEN --ca-sha256 HEX
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# 1: install from docker/wheels alone, for a machine without a network.
ARG PIP_NO_INDEX=
# Options may follow: "torch==2.13.0 --index-url <address of the CPU builds>" makes a smaller image.
ARG TORCH=torch==2.13.0
COPY docker/wheels /wheels
# What nobody runs there is left out: torch's own test programs, and its headers.
RUN python3 -m venv /opt/anabranch \
 && /opt/anabranch/bin/pip install --no-cache-dir --find-links /wheels ${TORCH} \
 && rm -rf /opt/anabranch/lib/python3*/site-packages/torch/test \
           /opt/anabranch/lib/python3*/site-packages/torch/include
COPY . /src
RUN /opt/anabranch/bin/pip install --no-cache-dir --find-links /wheels "/src[client,workloads,secagg,blake3]"

FROM ${BASE}
LABEL org.opencontainers.image.title="anabranch-client" \
      org.opencontainers.image.description="Asynchronous federated learning: a device" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/anabranch /opt/anabranch
# A new volume is as empty as its folder here: a home that is made by useradd has a shell's files in it.
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/anabranch --no-create-home anabranch \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/anabranch
ENV PATH=/opt/anabranch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2
USER 10001:10001
WORKDIR /var/lib/anabranch
VOLUME /var/lib/anabranch
STOPSIGNAL SIGTERM
ENTRYPOINT ["anabranch", "client"]
