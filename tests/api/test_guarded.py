"""A guarded server in Python: a device, and a script, join with a token and come back by their papers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded import issued

import anabranch as ab
from anabranch.api.participation import Participation
from anabranch.core.errors import ConfigError, NotAuthenticated
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind


class Federation:
    """A guarded server of a model, and its authority."""

    def __init__(self, folder: Path, authority: Authority, server: ab.Server) -> None:
        self.folder, self.authority, self.server = folder, authority, server

    def papers(self, name: str) -> dict[str, Any]:
        """What a device is told to join with, and where it keeps what it gets."""
        token = self.authority.invite(name, DAY_S)
        return {"token": token, "ca_sha256": self.authority.sha256, "state_dir": self.folder / name}

    def names(self) -> set[str]:
        """The devices that the server knows."""
        alice = issued(self.authority, Kind.OPERATOR, "alice", self.folder / "alice")
        with self.server.operator(alice.folder) as operator:
            return {client.client_id for client in operator.clients()}


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """Of two numbers; it takes five updates."""
    settings = {"identity.folder": str(tmp_path / "ca"), "identity.tls": "always"}
    with (
        Authority.create(tmp_path / "ca") as authority,
        ab.Server(numbers, strategy="fedasync", settings=settings, until=ab.Until(updates=5)) as server,
    ):
        yield Federation(tmp_path, authority, server)


def numbers() -> dict[str, Any]:
    return {"w": np.zeros(2, np.float32)}


def test_a_script_joins_and_comes_back_by_its_papers(federation: Federation) -> None:
    papers = federation.papers("script")
    for options in (papers, {"state_dir": papers["state_dir"]}):
        model = numbers()
        fed = ab.join(federation.server, model, tasks_max=1, **options)
        for _ in fed:
            model["w"] += 1
            fed.push(examples=3)
        assert fed.summary is not None
        assert fed.summary.applied == 1
    assert federation.names() == {"script"}


def test_a_device_of_another_address_names_where_it_joins(federation: Federation) -> None:
    papers, server = federation.papers("script"), federation.server
    model = numbers()
    fed = ab.join(server.address, model, join=server.join_address, tasks_max=1, **papers)
    for _ in fed:
        fed.push(examples=3)
    assert federation.names() == {"script"}


def test_nobody_takes_part_without_papers(federation: Federation) -> None:
    wrong = {**federation.papers("script"), "ca_sha256": "0" * 64}
    with pytest.raises(NotAuthenticated):
        next(iter(ab.join(federation.server, numbers(), **wrong)))
    with pytest.raises(ConfigError, match="--insecure, but this device has an identity"):
        next(iter(ab.join(federation.server, numbers(), insecure=True, **federation.papers("other"))))
    assert federation.names() == set()


def test_what_the_callbacks_of_trainers_share_joins_too(tmp_path: Path) -> None:
    """The real libraries have tests of their own (`make libraries`); their callbacks join by this."""
    settings = {"identity.folder": str(tmp_path / "ca"), "identity.tls": "always"}
    torch.manual_seed(0)
    with (
        Authority.create(tmp_path / "ca") as authority,
        ab.Server(torch.nn.Linear(2, 1), strategy="fedasync", settings=settings) as server,
    ):
        federation = Federation(tmp_path, authority, server)
        model, papers = torch.nn.Linear(2, 1), federation.papers("trainer")
        for options in ({**papers, "tasks_max": 2}, {"state_dir": papers["state_dir"], "tasks_max": 1}):
            device = Participation(server, False, options)  # type: ignore[arg-type] # of a mapping
            there_is_one = device.begin(model, processes=1)
            while there_is_one:
                device.steps = 1
                device.push(examples=4, metrics={"loss": 0.5})
                there_is_one = device.take()
            device.close()
            assert device.summary is not None
            assert device.summary.applied == options["tasks_max"]
        assert federation.names() == {"trainer"}
