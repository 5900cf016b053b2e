"""Operators' notes on clients: kept with the run, found again by them, and of no weight for the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from wire import Served, server_config

from anabranch.core.errors import ConfigError
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.operators import CLIENTS_MAX, TAGS_MAX
from anabranch.server.verify import verify


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    with Served(server_config(tmp_path / "data"), manifest) as server:
        for name in ("a", "b", "c"):
            server.device(name).work()
        yield server


def test_clients_are_found_by_their_tags(served: Served, tmp_path: Path, manifest: Manifest) -> None:
    with served.admin() as admin:
        assert admin.tag(["a", "b"], ["eu", "ward-3"]) == {"a": ["eu", "ward-3"], "b": ["eu", "ward-3"]}
        assert admin.tag(["b", "later"], ["eu", "old"], ["ward-3"]) == {
            "b": ["eu", "old"],
            "later": ["eu", "old"],
        }
        assert admin.tag(["b", "c"]) == {"b": ["eu", "old"], "c": []}
        assert {c.client_id: c.tags for c in admin.clients()} == {
            "a": ("eu", "ward-3"),
            "b": ("eu", "old"),
            "c": (),
        }
        assert [c.client_id for c in admin.clients(tag="eu")] == ["a", "b"]
        assert [c.client_id for c in admin.clients(1, "eu")] == ["a"]
        assert admin.clients(tag="nowhere") == []
        before = admin.status().updates_applied
    served.close()
    with Served(served.config, manifest) as again, again.admin() as admin:
        assert [c.client_id for c in admin.clients(tag="eu")] == ["a", "b"]
        assert admin.status().updates_applied == before
    assert verify(tmp_path / "data").problems == ()


def test_who_names_a_client_that_there_is_not_is_told(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.admin() as admin:
        assert admin.tag(["a", "devcie-7"]) == {"a": [], "devcie-7": []}
        unknown = "devcie-7: this run knows no client of that name: is it spelt so?"
        assert [r.getMessage() for r in caplog.records if "spelt" in r.getMessage()] == [unknown]
        assert admin.tag(["devcie-7"], ["eu"]) == {"devcie-7": ["eu"]}, "it has it when it comes"
        assert caplog.messages.count(unknown) == 2


def test_tags_are_no_events(served: Served) -> None:
    with served.admin() as admin:
        last = admin.metrics().log_seq
        assert last > 0
        admin.tag(["a"], ["eu", "old"])
        admin.tag(["a"], ["other"], ["old"])
        assert admin.metrics().log_seq == last


def test_all_of_a_tag_go_into_quarantine_and_out(served: Served) -> None:
    with served.admin() as admin:
        admin.tag(["a", "c"], ["ward-3"])
        assert admin.quarantine("", "a recall", "ward-3") == ["a", "c"]
        assert admin.status().quarantined == {"a": "a recall", "c": "a recall"}
        admin.tag(["b"], ["ward-3"])  # tagged later: nothing becomes of it
        assert set(admin.status().quarantined) == {"a", "c"}
        assert admin.release("", "ward-3")
        assert not admin.release("", "ward-3")
        assert admin.status().quarantined == {}


def test_what_is_refused(served: Served) -> None:
    with served.admin() as admin:
        with pytest.raises(ConfigError, match="no client has the tag 'nobody'"):
            admin.quarantine("", "", "nobody")
        with pytest.raises(ConfigError, match="not both"):
            admin.release("a", "eu")
        with pytest.raises(ConfigError, match="tag must be"):
            admin.tag(["a"], ["two words"])
        with pytest.raises(ConfigError, match="client_id must be"):
            admin.tag(["../a"], ["eu"])
        with pytest.raises(ConfigError, match="name 1 to"):
            admin.tag([], ["eu"])
        with pytest.raises(ConfigError, match=f"name 1 to {CLIENTS_MAX}"):
            admin.tag([f"c{n}" for n in range(CLIENTS_MAX + 1)], ["eu"])
        with pytest.raises(ConfigError, match=f"{TAGS_MAX} at most"):
            admin.tag(["a"], [f"t{n}" for n in range(TAGS_MAX + 1)])
        assert admin.tag(["a"]) == {"a": []}
