# A keeper, which is another party's than the server: no torch, no root. Build from the root of the tree:
#   docker build -f docker/keeper.Dockerfile -t anabranch-keeper .
# Its keys and its memory lie on the volume; ca.pem is the certificate of the devices' authority (docs/privacy.md):
#   docker run --rm -v keeper:/var/lib/anabranch -v "$PWD/ca.pem:/ca.pem:ro" anabranch-keeper init --ca /ca.pem
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     -v keeper:/var/lib/anabranch -p 7075:7075 anabranch-keeper
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# 1: install from docker/wheels alone, for a machine without a network.
ARG PIP_NO_INDEX=
COPY docker/wheels /wheels
COPY . /src
# What nobody runs there is left out: tests of libraries, and what installs more.
RUN python3 -m venv /opt/anabranch \
 && /opt/anabranch/bin/pip install --no-cache-dir --find-links /wheels "/src[keeper]" \
 && find /opt/anabranch -type d -name tests -prune -exec rm -rf {} + \
 && /opt/anabranch/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="anabranch-keeper" \
      org.opencontainers.image.description="Asynchronous federated learning: a keeper of masks" \
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
EXPOSE 7075
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
  CMD ["anabranch", "keeper", "health"]
ENTRYPOINT ["anabranch", "keeper"]
CMD ["serve", "--listen", "0.0.0.0:7075"]
