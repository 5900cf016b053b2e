"""What stands in docker/prometheus and docker/grafana, with the real Prometheus and a real server."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from prometheus import NOT_HERE, PATIENCE_S, PROMETHEUS, PROMTOOL, Prometheus, prometheus
from waits import until
from wire import Served, server_config

from anabranch.server.manifest import write_manifest

FILES = Path(__file__).parents[2] / "docker"
pytestmark = pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason=NOT_HERE)


def promtool(*arguments: str, given: bytes = b"") -> str:
    """What it says, on either stream; it must be content."""
    done = subprocess.run([str(PROMTOOL), *arguments], input=given, capture_output=True, timeout=PATIENCE_S)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@contextmanager
def served(folder: Path, **tables: Any) -> Iterator[Served]:
    manifest = write_manifest(folder / "model", "test", {"w": np.zeros(8, np.float32)})
    config = server_config(folder / "data", server={"metrics_address": "127.0.0.1:0"}, **tables)
    with Served(config, manifest) as running:
        yield running


@contextmanager
def at_work(running: Served) -> Iterator[None]:
    """A device that goes on and on."""
    device, stop = running.device(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            device.work()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def hurried(text: str) -> str:
    """Minutes become seconds: nobody waits for a test as for a night."""
    return re.sub(r"\[\d+[mh]\]", "[3s]", re.sub(r"for: \d+m", "for: 1s", text))


@contextmanager
def watching(folder: Path, running: Served) -> Iterator[Prometheus]:
    """The configuration of `docker/prometheus`, on this server."""
    assert running.info is not None
    config = (FILES / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    config = config.replace("127.0.0.1:9464", running.info.metrics_address).replace("15s", "200ms")
    folder.mkdir()
    rules = (FILES / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    (folder / "alerts.yml").write_text(hurried(rules), encoding="utf-8")
    with prometheus(folder, config) as found:
        yield found


def test_the_rules_are_rules_and_do_what_they_say() -> None:
    folder = FILES / "prometheus"
    assert "14 rules found" in promtool("check", "rules", str(folder / "alerts.yml"))
    promtool("check", "config", str(folder / "prometheus.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(folder / "alerts_test.yml"))
    names = re.findall(r"alert: (\w+)", (folder / "alerts.yml").read_text(encoding="utf-8"))
    tested = (folder / "alerts_test.yml").read_text(encoding="utf-8")
    assert all(tested.count(f"alertname: {name}") >= 2 for name in names), "fires, and does not"


def test_no_server_is_missed_that_the_composition_does_not_start() -> None:
    promtool("check", "config", str(FILES / "prometheus" / "compose.yml"))
    config = yaml.safe_load((FILES / "prometheus" / "compose.yml").read_text(encoding="utf-8"))
    services = yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))["services"]
    (scrape,) = config["scrape_configs"]
    targets = [target for group in scrape["static_configs"] for target in group["targets"]]
    assert targets
    assert [target for target in targets if "profiles" in services[target.rpartition(":")[0]]] == []
    looked_up = {name for group in scrape["dns_sd_configs"] for name in group["names"]}
    assert looked_up <= {name for name, service in services.items() if "profiles" in service}


def test_the_names_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        running.device().work()
        assert running.info is not None
        with urllib.request.urlopen(f"http://{running.info.metrics_address}/metrics", timeout=600) as answer:
            text = answer.read()
    assert promtool("check", "metrics", given=text) == ""


def test_a_stall_is_told_and_ends(tmp_path: Path) -> None:
    with served(tmp_path) as running, watching(tmp_path / "prometheus", running) as watcher:
        with at_work(running):
            until(lambda: watcher.value('up{job="anabranch"}') == 1)
            until(lambda: (watcher.value("anabranch_push_bytes_count") or 0) > 10)
        until(lambda: "AnabranchStalled" in watcher.firing())
        with at_work(running):
            until(lambda: "AnabranchStalled" not in watcher.firing())
            rules = [rule for group in watcher.ask("rules")["groups"] for rule in group["rules"]]
            assert [(r["name"], r["health"]) for r in rules if r["health"] != "ok"] == []
        running.close()
        until(lambda: "AnabranchServerDown" in watcher.firing())


def test_a_run_that_is_given_up_is_told_until_it_goes_on(tmp_path: Path) -> None:
    given = served(tmp_path, run={"rejections_max": 3})
    with given as running, watching(tmp_path / "prometheus", running) as watcher:
        device = running.device()
        assert device.work().decision.verdict == "published"
        until(lambda: watcher.value("anabranch_given_up") == 0)
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                device.answer(device.task(), float("nan"))
        until(lambda: "AnabranchGivenUp" in watcher.firing())
        with running.admin() as operator:
            operator.set_settings({"run.rejections_max": 6})
        assert device.work().decision.verdict == "published"
        until(lambda: "AnabranchGivenUp" not in watcher.firing())


def test_every_query_of_the_dashboard_is_answered(tmp_path: Path) -> None:
    board = json.loads((FILES / "grafana" / "dashboards" / "anabranch.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    # What has no series before it has happened once.
    quiet = ("rejected", "leases_ended", "asks_refused", "calls_shed", 'code!="OK"')
    with served(tmp_path) as running, watching(tmp_path / "prometheus", running) as watcher, at_work(running):
        for query in queries:
            asked = query.replace("$instance", ".*").replace("$run", ".*").replace("$__rate_interval", "3s")

            def answered(asked: str = asked) -> bool:
                return bool(watcher.ask("query", query=asked)["result"])

            if not any(word in query for word in quiet):
                until(answered)
            answered()
