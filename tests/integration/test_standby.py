"""A standby that could not take over says so while another server leads, and not when it is its turn."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wire import Served, server_config

from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, ConfigError, DataError, ManifestMismatch
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.noise_key import NOISE_KEY, new_key
from anabranch.server.app import serve
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.proofs import AUTHORITIES
from anabranch.server.recovery import check_takeover
from anabranch.server.seen_register import FILE as REGISTER
from anabranch.server.store.factory import store_of

PRIVATE = {"clip": 1.0, "epsilon": 8.0, "participations": 4}
WAIT_S = 300.0


class StandingBy(Served):
    """A server that waits for its turn: entered once it has said so, `led` once it has come."""

    def __init__(self, config: Config, manifest: Manifest) -> None:
        super().__init__(config, manifest)
        self.led = threading.Event()

    async def _serve(self) -> int:
        return await serve(
            self.config,
            self.manifest,
            ready=lambda _: self.led.set(),
            stop=self._stop,
            waiting=lambda _: self._ready.set(),
        )


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros((8, 4), np.float32)})


def private(folder: Path, database: str, **server: Any) -> Config:
    """A server of one private run, with data of its own."""
    return server_config(
        folder,
        strategy={"name": "fedbuff", "buffer_size": 2},
        privacy=PRIVATE,
        fleet={"clients": 4},
        server={"database": database, **server},
    )


def test_a_standby_without_the_runs_key_says_so_at_its_start(
    manifest: Manifest, tmp_path: Path, postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anabranch")
    lack = f"this standby cannot take over as it is: {tmp_path / 'b' / NOISE_KEY} is missing"
    with Served(private(tmp_path / "a", postgresql_url), manifest) as leader:
        leader.device().work()
        standby = StandingBy(private(tmp_path / "b", postgresql_url, standby=True), manifest)
        with standby:
            assert [r.levelname for r in caplog.records if lack in r.message] == ["WARNING"]
            shutil.copy(tmp_path / "a" / NOISE_KEY, tmp_path / "b")
            assert leader.close() == 0
            assert standby.led.wait(WAIT_S)
    assert standby.exit_code == 0


def guarded(folder: Path, database: str) -> list[Config]:
    """A server and a standby of it, by the authority of the folder `ca`."""
    identity = {"folder": str(folder / "ca"), "join_address": "127.0.0.1:0", "tls": "always"}
    return [
        server_config(folder / name, identity=identity, server={"database": database, **more})
        for name, more in (("a", {}), ("b", {"standby": True}))
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_standby_on_an_older_register_than_it_has_seen_says_so_at_its_start(
    manifest: Manifest, tmp_path: Path, postgresql_url: str, caplog: pytest.LogCaptureFixture, ahead: int
) -> None:
    with Authority.create(tmp_path / "ca") as authority:
        authority.invite("device-1", DAY_S)
        seen = {authority.sha256: [authority.point.changes + ahead, 0, ""]}
    folder, noted = str(tmp_path / "ca"), tmp_path / "b" / REGISTER
    leading, waiting = guarded(tmp_path, postgresql_url)
    noted.parent.mkdir(exist_ok=True)
    noted.write_text(json.dumps(seen))
    lack = f"this standby cannot take over as it is: {folder} is older than this server has seen it"
    with Served(leading, manifest), StandingBy(waiting, manifest):
        said = [r.message for r in caplog.records if "cannot take over" in r.message]
        assert len(said) == ahead
        assert all(text.startswith(lack) for text in said)
        assert json.loads(noted.read_text()) == seen, "who leads writes there, not who looks"


def test_a_standby_whose_list_of_authorities_is_damaged_says_so_at_its_start(
    manifest: Manifest, tmp_path: Path, postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    Authority.create(tmp_path / "ca").close()
    leading, waiting = guarded(tmp_path, postgresql_url)
    listed = tmp_path / "b" / AUTHORITIES
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("-----BEGIN CERTIFICATE-----\nnothing\n")
    with Served(leading, manifest), StandingBy(waiting, manifest):
        [said] = [r.message for r in caplog.records if "cannot take over" in r.message]
    assert said.startswith(f"this standby cannot take over as it is: {listed} is damaged")


def other_seed(config: Config, manifest: Manifest, folder: Path) -> tuple[Config, Manifest]:
    return replace(config, run=replace(config.run, seed=1)), manifest


def other_model(config: Config, manifest: Manifest, folder: Path) -> tuple[Config, Manifest]:
    return config, write_manifest(folder / "other", "test", {"w": np.ones((8, 4), np.float32)})


def other_key(config: Config, manifest: Manifest, folder: Path) -> tuple[Config, Manifest]:
    new_key(config, folder / "elsewhere", "another")
    shutil.copy(folder / "elsewhere" / NOISE_KEY, folder / "b")
    return config, manifest


def no_archive(config: Config, manifest: Manifest, folder: Path) -> tuple[Config, Manifest]:
    (folder / "file").write_text("")
    return replace(config, server=replace(config.server, archive=str(folder / "file" / "archive"))), manifest


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (other_seed, ConfigError, r"run\.seed is 1, but this run was started with 0"),
        (other_model, ManifestMismatch, "with other first weights"),
        (other_key, DataError, "is the key of run another"),
        (no_archive, ConfigError, r"server\.archive: .* name a folder that can be written"),
    ],
)
def test_what_else_a_takeover_would_end_at_is_seen_before(
    manifest: Manifest,
    tmp_path: Path,
    postgresql_url: str,
    change: Callable[[Config, Manifest, Path], tuple[Config, Manifest]],
    error: type[AnabranchError],
    words: str,
) -> None:
    mine = private(tmp_path / "b", postgresql_url, standby=True)
    store = store_of(mine.server)
    check_takeover(store, mine, manifest)  # nobody has begun: it would
    with Served(private(tmp_path / "a", postgresql_url), manifest) as leader:
        leader.device().work()
        (tmp_path / "b").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "a" / NOISE_KEY, tmp_path / "b")
        check_takeover(store, mine, manifest)
        with pytest.raises(error, match=words):
            check_takeover(store, *change(mine, manifest, tmp_path))
        assert leader.device("device-2").work(), "it leads on"
    store.close()
