"""docs/observability.md: a server whose metrics are read as Prometheus reads them."""

from signal import SIGINT

from walking import End, Walk, Write, also, starts, types

RUN = """
[run]
name = "watched"
workload = "synthetic"
[client]
steps = 10
"""
SERVER = "anabranch server run.toml --model model --metrics"
READ = (
    "python -c 'import urllib.request; "
    'print(urllib.request.urlopen("http://127.0.0.1:9464/metrics").read().decode())\''
)

METRICS = Walk(
    "metrics",
    page="docs/observability.md",
    needs="server",
    steps=(
        Write("run.toml", RUN),
        also("anabranch init synthetic --out model"),
        starts(SERVER, until="metrics on http://127.0.0.1:9464/metrics"),
        also("anabranch client synthetic --tasks-max 3", says="3 updates answered"),
        also(READ, says='anabranch_updates_total{reason="",verdict="'),
        End(SERVER, by=SIGINT, says="drained"),
        types(
            "OTEL_TRACES_EXPORTER=otlp",
            ends=2,
            says=r'opentelemetry is not installed.*pip install "anabranch\[tracing\]"',
        ),
    ),
)

WALKS = (METRICS,)
