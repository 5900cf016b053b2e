"""What devices' memories bear, over real gRPC: said, listed, heeded, and refused where there is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire import Device, Served, server_config

from anabranch.api.devices import Client
from anabranch.cli.jobs import _device_words
from anabranch.cli.output import Output
from anabranch.cli.processes import FleetProcesses
from anabranch.client.run import ClientOptions, run_client
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError
from anabranch.core.model.submodels import UnitMap
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.verify import verify
from anabranch.testing.models import CELLS, GROUPS, HIDDEN, tensors
from anabranch.workloads.app import load_app
from anabranch.workloads.trainer import trainer_for

HALVES = {"strategy": {"name": "fedbuff", "buffer_size": 1}, "submodel": {"name": "random", "drop": 0.0}}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", tensors(), GROUPS)


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    with Served(server_config(tmp_path / "data", **HALVES), manifest) as server:
        yield server


def device(served: Served, name: str) -> Device:
    """One that has said nothing yet."""
    return Device(served.channel(), served.manifest.spec, name)


def kept(of: Device) -> tuple[int, ...]:
    """How many units of each group its next task has."""
    part = of.submodel(of.task())
    return tuple(map(len, part.kept)) if isinstance(part, UnitMap) else (HIDDEN, CELLS)


def listed(served: Served) -> dict[str, float]:
    assert served.info is not None
    with served.admin() as admin:
        return {c.client_id: c.width_max for c in admin.clients()}


def test_parts_are_as_wide_as_a_device_said_last(served: Served, tmp_path: Path, manifest: Manifest) -> None:
    a, b = device(served, "a"), device(served, "b")
    a.enrol(width_max=0.4)
    b.enrol()
    assert (kept(a), kept(b)) == ((3, 1), (HIDDEN, CELLS))
    a.enrol(width_max=0.75)
    assert kept(a) == (6, 2)
    assert listed(served) == {"a": 0.75, "b": 1.0}
    served.close()
    with Served(served.config, manifest) as again:
        assert listed(again) == {"a": 0.75, "b": 1.0}
        assert kept(device(again, "a")) == (6, 2)  # it has not said it to this server
    assert verify(tmp_path / "data").problems == ()


def refusal(of: Device, **said: Any) -> tuple[str, str]:
    """The status and the words."""
    with pytest.raises(grpc.RpcError) as caught:
        of.enrol(**said)
    error: Any = caught.value
    return error.code().name, error.details()


def test_what_is_no_share_and_what_is_too_little_is_refused_at_once(served: Served) -> None:
    a = device(served, "a")
    status, words = refusal(a, width_max=0.0)
    assert status == "INVALID_ARGUMENT"
    assert words.startswith(
        "capability.width_max must be above 0 and at most 1, the share of the model's units"
    )
    status, words = refusal(a, width_max=0.3)
    assert status == "INVALID_ARGUMENT"
    assert "no task is of less than 0.3334 of the model's units" in words
    assert "say width_max = 0.3334" in words
    assert "group 'lstm' has 3 units" in words
    assert listed(served) == {}


def test_a_run_of_whole_models_lets_in_who_bears_them(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        a, b = device(served, "a"), device(served, "b")
        status, words = refusal(a, width_max=0.5)
        assert status == "INVALID_ARGUMENT"
        assert "width_max is 0.5, and in this run every task is of the whole model" in words
        assert "submodel.name" in words
        b.enrol(width_max=1.0)
        assert listed(served) == {"b": 1.0}


def test_the_agent_says_it_and_ends_with_the_servers_words(tmp_path: Path) -> None:
    """Of `anabranch client`: what whoever runs it has set."""
    app = load_app("synthetic")
    manifest = write_manifest(tmp_path / "model", "test", tensors(), GROUPS)
    with Served(server_config(tmp_path / "data"), manifest) as served:
        assert served.info is not None
        options = ClientOptions(
            "synthetic", served.info.address, "a", state_dir=tmp_path / "a", width_max=0.5
        )
        with pytest.raises(ConfigError, match=r"width_max is 0\.5.*whole model.*submodel\.name"):
            run_client(options, app=app)
        assert listed(served) == {}


def test_an_agent_ends_where_the_server_gives_it_more_than_it_bears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of an older release knows nothing of widths: it lets everybody in, and gives what it has."""
    monkeypatch.setattr("anabranch.host.run.too_narrow", lambda *_: "")
    app = load_app("synthetic")
    manifest = write_manifest(tmp_path / "model", "synthetic", trainer_for(app).initial(0))
    config = server_config(tmp_path / "data", run={"workload": "synthetic"})
    with Served(config, manifest) as served:
        assert served.info is not None
        told: list[str] = []
        options = ClientOptions(
            "synthetic", served.info.address, "a", (0, 2), tmp_path / "a", tasks_max=1, width_max=0.5
        )
        with pytest.raises(ConfigError, match=r"width_max is 0\.5, and the server gives this device a wider"):
            run_client(options, lambda kind, **_: told.append(kind), app)
        assert {"fetched", "trained", "pushed"} & set(told) == set()
        with served.admin() as admin:
            assert admin.status().updates_applied == 0
        assert device(served, "b").enrol()


@pytest.mark.parametrize("width_max", ["0.5", None, True])
def test_what_is_no_number_is_no_width(width_max: Any) -> None:
    with pytest.raises(ConfigError, match=r"width_max must be above 0 and at most 1"):
        Client("synthetic", "127.0.0.1:1", width_max=width_max)


def test_whoever_starts_devices_tells_them_their_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo its processes, by `[fleet]`; a device of many jobs those of each; `Client` its agent."""
    options = ClientOptions("synthetic", width_max=0.25)
    words = _device_words(options, (), Output(False), "info")
    assert words[words.index("--width-max") + 1] == "0.25"
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(FleetProcesses, "_start", lambda _, name, words, *__: started.update({name: words}))
    settings = merge([("test", {"fleet": {"clients": 2, "widths_max": [1.0, 0.5]}})])
    FleetProcesses(tmp_path, settings, "synthetic").start_devices(("a:1", "a:2"), 2)
    said = {
        name: words[words.index("--width-max") + 1] for name, words in started.items() if "device" in name
    }
    assert said == {"device-0": "1.0", "device-1": "0.5"}
    assert Client("synthetic", "127.0.0.1:1", width_max=0.5)._options.width_max == 0.5


@pytest.mark.parametrize("width_max", [0.0, 1.5, float("nan")])
def test_an_agent_with_no_share_does_not_begin(width_max: float) -> None:
    with pytest.raises(ConfigError, match=r"width_max must be above 0 and at most 1"):
        ClientOptions("synthetic", width_max=width_max)
