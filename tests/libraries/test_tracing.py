"""One update is one trace, from the device's ask to the version: real processes, the real SDK."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.logs import _JsonLines
from anabranch.support.tracing import begin_tracing, ids_of, span

pytestmark = pytest.mark.libraries

ANABRANCH = Path(sys.executable).with_name("anabranch")
PATIENCE_S = 600.0
OF_THE_DEVICE, OF_THE_SERVER = (
    {"ask", "fetch", "train", "encode", "push", "update"},
    {"receive", "commit", "fold"},
)
RUN = """
[run]
workload = "synthetic"
updates_max = 6
[strategy]
name = "fedbuff"
buffer_size = 2
[client]
steps = 4
"""


class Program:
    """A command of ours that traces into a file; its lines of JSON."""

    def __init__(self, folder: Path, *arguments: str, exporter: str = "") -> None:
        wanted = exporter or f"file:{folder}/spans.jsonl"
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [ANABRANCH, *arguments, "--json"],
                cwd=folder,
                env=os.environ | {"OTEL_TRACES_EXPORTER": wanted},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def until(self, kind: str) -> dict[str, Any]:
        """Read on to the next line of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said.get("kind") == kind:
                return said
        raise AssertionError(f"it ended, and never said {kind}")

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.ended()

    def ended(self) -> int:
        """Its exit code, once it has one."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(PATIENCE_S)


@contextmanager
def served(folder: Path) -> Iterator[tuple[Program, str]]:
    (folder / "run.toml").write_text(RUN)
    subprocess.run(
        [ANABRANCH, "init", "synthetic", "--out", "model"], cwd=folder, check=True, capture_output=True
    )
    ports = ["--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"]
    server = Program(folder, "server", "run.toml", "--model", "model", *ports)
    try:
        yield server, server.until("serving")["address"]
    finally:
        server.process.send_signal(signal.SIGCONT)
        assert server.end(signal.SIGTERM) == 0, (folder / "log").read_text()


def device(folder: Path, address: str, *more: str) -> Program:
    return Program(folder, "client", "synthetic", "--server", address, "--state-dir", "device", *more)


def traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each trace, in the order in which they ended."""
    found = defaultdict(list)
    for line in (folder / "spans.jsonl").read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # it is being written
            continue
        made = json.loads(line)
        found[made["context"]["trace_id"]].append(made)
    return found


def by_name(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(made for made in spans if made["name"] == name)


def await_span(folder: Path, name: str, pid: int) -> str:
    """The trace of the newest span of this name that the process has ended, once there is one."""
    latest = time.monotonic() + PATIENCE_S
    while time.monotonic() < latest:
        for trace, spans in traces(folder).items():
            for made in spans:
                if (made["name"], made["resource"]["attributes"]["process.pid"]) == (name, pid):
                    return trace
    raise AssertionError(f"no {name} came")


def test_an_update_is_one_trace(tmp_path: Path) -> None:
    with served(tmp_path) as (server, address):
        worker = device(tmp_path, address)
        server.until("ended")
        assert worker.ended() == 0
    whole = [spans for spans in traces(tmp_path).values() if any(s["name"] == "update" for s in spans)]
    assert len(whole) == 6
    for spans in whole:
        names = [made["name"] for made in spans]
        assert set(names) == OF_THE_DEVICE | OF_THE_SERVER | {"publish"}
        assert len(names) == len(set(names)), "each once"
        first = by_name(spans, "update")
        trace, span = ids_of(first["attributes"]["task"])
        assert first["context"]["trace_id"] == f"0x{trace:032x}"
        assert first["context"]["span_id"] == f"0x{span:016x}"
        assert first["parent_id"] is None
        parents = {made["name"]: made["parent_id"] for made in spans}
        for name in ("ask", "fetch", "train", "push", "publish"):
            assert parents[name] == first["context"]["span_id"]
        assert parents["encode"] == by_name(spans, "train")["context"]["span_id"]
        assert parents["receive"] == by_name(spans, "push")["context"]["span_id"], "told over the wire"
        assert parents["commit"] == parents["fold"] == by_name(spans, "receive")["context"]["span_id"]
        assert first["start_time"] <= min(made["start_time"] for made in spans)
        version = by_name(spans, "publish")["attributes"]["version"]
        assert version - by_name(spans, "train")["attributes"]["version"] in (1, 2)
        services = {made["name"]: made["resource"]["attributes"]["service.name"] for made in spans}
        assert {services[name] for name in OF_THE_DEVICE} == {"anabranch-client"}
        assert {services[name] for name in OF_THE_SERVER | {"publish"}} == {"anabranch-server"}


def test_a_push_after_a_kill_is_of_the_same_trace(tmp_path: Path) -> None:
    slow = ("--step-time", "0.3")
    with served(tmp_path) as (server, address):
        for _ in range(5):  # a kill may come too late: then another one
            worker = device(tmp_path, address, *slow)
            worker.until("granted")
            await_span(tmp_path, "fetch", worker.process.pid)
            server.process.send_signal(signal.SIGSTOP)  # the update is made, and nobody takes it
            trace = await_span(tmp_path, "train", worker.process.pid)
            worker.end(signal.SIGKILL)
            server.process.send_signal(signal.SIGCONT)
            if not any(made["name"] == "update" for made in traces(tmp_path)[trace]):
                break
        again = device(tmp_path, address)
        again.until("pushed")
        server.until("ended")
        assert again.ended() == 0
        spans = traces(tmp_path)[trace]
    assert {made["name"] for made in spans} == OF_THE_DEVICE | OF_THE_SERVER | {"publish"}
    pids = {made["name"]: made["resource"]["attributes"]["process.pid"] for made in spans}
    assert pids["train"] == worker.process.pid
    assert pids["push"] == pids["update"] == again.process.pid
    assert [made["name"] for made in spans].count("fold") == 1, "it counted once"


def test_what_is_meant_is_asked(tmp_path: Path) -> None:
    program = Program(tmp_path, "client", "synthetic", exporter="jaeger")
    assert program.ended() == 2
    assert "OTEL_TRACES_EXPORTER must be none, otlp or file:PATH" in (tmp_path / "log").read_text()


@pytest.fixture
def spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process traces, into a file of this folder."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", f"file:{tmp_path}/spans.jsonl")
    begin_tracing("test")
    yield tmp_path
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    begin_tracing("test")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the file is open as long as the process
def test_a_foreign_trace_is_not_joined(spans: Path) -> None:
    trace, first = ids_of("t")
    for parent in (
        "",
        f"00-{trace:032x}-{7:016x}-01",
        f"00-{9:032x}-{7:016x}-01",
        "00-",
        f"00-{trace:032x}-x",
    ):
        with span("receive", "t", parent):
            pass
    (of_the_task,) = traces(spans).values()
    assert [int(made["parent_id"], 16) for made in of_the_task] == [first, 7, first, first, first]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_lines_of_the_log_name_their_trace(spans: Path) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "text", None, None)
    with span("train", "t"):
        inside = json.loads(_JsonLines().format(record))
    assert inside["trace_id"] == f"{ids_of('t')[0]:032x}"
    assert "trace_id" not in json.loads(_JsonLines().format(record))
