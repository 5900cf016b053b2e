"""A real Prometheus, where one is installed (Debian: `apt-get install prometheus`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free_port

PATIENCE_S = 600.0
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
NOT_HERE = "no prometheus is here: apt-get install prometheus"


class Prometheus:
    """One that runs; `address` is `host:port`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **query: str) -> Any:
        """What its HTTP interface answers under `/api/v1`."""
        where = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(where, timeout=600) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def value(self, query: str) -> float | None:
        """The first value of a query, None where there is none."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """The alerts that fire."""
        return {a["labels"]["alertname"] for a in self.ask("alerts")["alerts"] if a["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, config: str, *options: str) -> Iterator[Prometheus]:
    """Start it with this configuration, and wait until it answers."""
    assert PROMETHEUS is not None, NOT_HERE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        command = [PROMETHEUS, *arguments, f"--web.listen-address={address}", *options]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _await(process, address, log)
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _await(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    latest = time.monotonic() + PATIENCE_S
    while time.monotonic() < latest:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        try:
            urllib.request.urlopen(f"http://{address}/-/ready", timeout=600).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
        else:
            return
    raise AssertionError(log.read_text(encoding="utf-8"))
