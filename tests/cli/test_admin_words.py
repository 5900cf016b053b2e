"""What people read of a run: `admin status`, `clients` and `versions` have each figure where it is named."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from page_tables import lines_of
from wire import Served, server_config

from anabranch.cli import admin
from anabranch.identity.certificates import time_text
from anabranch.reports.text import NOTHING, bytes_text
from anabranch.server.manifest import Manifest, write_manifest

INT8 = ("int8",)
TABLES: dict[str, Any] = {
    "run": {"name": "wards"},
    "uplink": {"codec": "int8"},
    "downlink": {"codec": "int8"},
    "robust": {"clip": 2.0, "flaws_max": 4},
    "strategy": {"name": "fedbuff", "buffer_size": 2},
}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(800, np.float32)})


@pytest.fixture
def visited(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server in its second life.

    `quick`: 13 updates taken, the last of them here, where it has sent it three times; `long`: one taken and
    shortened; `noise`: three flaws. `slow` is in training; `long` and `noise` have not called again.
    """
    config = server_config(tmp_path / "data", **TABLES)
    with Served(config, manifest) as served:
        quick, noise = served.device("quick", INT8), served.device("noise")
        for _ in range(12):
            quick.work()
        assert served.device("long").work(50.0).decision.detail.startswith("shortened to")
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                noise.answer(noise.task(), np.inf)
    with Served(config, manifest) as served:
        quick, slow = served.device("quick", INT8), served.device("slow", INT8)
        slow.task()
        task, one = quick.task(), str(uuid.uuid4())
        for _ in range(3):
            quick.answer(task, update_id=one)
        for _ in range(2):
            quick.fetch(codecs=INT8)
        yield served


def told(served: Served, command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says."""
    assert served.info is not None
    command(admin=served.info.admin_address, identity=None, insecure=False, as_json=False)
    return capsys.readouterr().out


def test_the_status_in_words(visited: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with visited.admin() as client:
        client.set_settings({"run.updates_max": 500})
        client.quarantine("noise", "sends noise")
        client.rollback(6, ["long"])
        visited.model()  # an evaluator fetches what it reports of
        client.report_metrics(8, {"accuracy": 0.9})
        client.pause()
        s = client.status()
    (change,) = s.settings_changed
    traffic = s.uplink_bytes, s.uplink_bytes_raw, s.downlink_bytes, s.downlink_bytes_full_equivalent
    assert len(set(traffic)) == 4
    carried = "{} up ({} raw), {} down ({} raw)".format(*map(bytes_text, traffic))
    lines = told(visited, admin.status, capsys).splitlines()
    assert [re.sub(r"\([^()]* ago\)", "(some time ago)", line) for line in lines] == [
        "wards (fedbuff): version 8, paused",
        "  now: 2 of 4 clients online, 1 in training",
        f"  since the run began ({time_text(s.created_at_s)}): 14 updates applied, 3 rejected, 0 leases lost",
        f"  since the server started (some time ago): {carried}, 2 resent",
        "  1 rollback: 1 of the updates applied are left out since",
        "  in quarantine: long (a rollback to version 6 left its updates out)",
        "  in quarantine: noise (sends noise)",
        f"  run.updates_max = 500 (was 0), set by {change.by}, {time_text(change.at_s)}",
        "  best of those held: version 8, accuracy 90.00 %",
    ]


def test_the_clients_in_a_table(
    visited: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with visited.admin() as client:
        client.quarantine("noise", "sends noise")
        client.tag(["slow", "quick"], ["ward-3"])
        client.tag(["slow"], ["attic"])
    assert lines_of(told(visited, partial(admin.clients, limit=0, tag=""), capsys)) == [
        ["client", "taken", "rejected", "flaws", "shortened", "quarantine", "last seen", "behind", "tags"],
        ["noise", "0", "3", "3", "0", "sends noise", NOTHING, NOTHING, ""],
        ["long", "1", "0", "0", "1", "", NOTHING, NOTHING, ""],
        ["quick", "13", "0", "0", "0", "", "online", "1", "ward-3"],
        ["slow", "0", "0", "0", "0", "", "online", "1", "attic ward-3"],
    ]


def test_the_versions_in_a_table(visited: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with visited.admin() as client:
        visited.model()
        client.report_metrics(7, {"accuracy": 0.9, "loss": 0.25})
        ends = [["yes" if row.held else "", (row.sha256 or "")[:16]] for row in client.versions()]
    assert lines_of(told(visited, partial(admin.versions, after=5, last=0), capsys)) == [
        ["version", "updates", "accuracy", "held", "sha256"],
        ["6", "2", NOTHING, *ends[5]],
        ["7", "2", "90.00 %", *ends[6]],
    ]
