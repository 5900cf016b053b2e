"""What devices' memories bear, over real gRPC: said, listed, heeded, and refused where there is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire import Device, Served, server_config

from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.core.errors import ConfigError
from anabranch.core.model.submodels import UnitMap
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.verify import verify
from anabranch.testing.models import CELLS, GROUPS, HIDDEN, tensors
from anabranch.workloads.app import load_app

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
    with OperatorClient(served.info.admin_address) as admin:
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
    assert "no task is of less than 0.3334 of the model's units: say width_max = 0.3334" in words
    assert "group 'lstm' has 3 units only" in words
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


@pytest.mark.parametrize("width_max", [0.0, 1.5, float("nan")])
def test_an_agent_with_no_share_does_not_begin(width_max: float) -> None:
    with pytest.raises(ConfigError, match=r"width_max must be above 0 and at most 1"):
        ClientOptions("synthetic", width_max=width_max)
