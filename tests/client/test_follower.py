"""Followers in virtual time, and what a device makes of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from virtual import VirtualTime

from anabranch.client.base_model import BaseModel
from anabranch.client.faulty import Fault, FaultKind, FaultyTransport
from anabranch.client.follower import Follower
from anabranch.client.lease import Cancelled
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import FetchedModel
from anabranch.client.shards import shard_of
from anabranch.client.trainer import LocalTrainer
from anabranch.compress.registry import stages
from anabranch.core.config.goal import AUTO_GOAL, Goal
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import AnabranchError, DataError, ManifestMismatch, Unavailable
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Capability, LocalPlan, Task
from anabranch.testing.federation import config, first_weights, result_of
from anabranch.workloads.app import Examples, Shard, load_app
from anabranch.workloads.synthetic import Synthetic


class Publisher:
    """A run whose next versions come while the follower rests."""

    def __init__(self, versions_max: int, together: int = 1) -> None:
        self.time = VirtualTime()
        settings = config(run={"versions_max": versions_max})
        self.server = LocalServer(first_weights(), settings, self.time.now)
        self.device = LocalTransport(self.server, "a")
        self.device.enrol(Capability())
        self._together = together

    def publish(self) -> None:
        """One version more, unless the run has ended."""
        spec, n = self.server.spec, self.server.engine.version
        task = self.device.ask(Ask("a", f"t-{n}"), spec)
        if isinstance(task, Task):
            self.device.push(result_of(task, spec, f"u-{n}", 0.0))

    def fetch(
        self, manifest_sha256: str, version: int | None = None, newer_than: int | None = None
    ) -> FetchedModel:
        """What the follower calls; after each answer the run goes on."""
        answer = self.device.fetch(manifest_sha256, version, newer_than)
        for _ in range(self._together):
            self.publish()
        return answer


class Following(LocalTransport):
    """A follower's transport: only `fetch` matters."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher.server, "follower")
        self._publisher = publisher

    def fetch(
        self,
        manifest_sha256: str,
        version: int | None = None,
        newer_than: int | None = None,
        holds: Holdings = None,
        exact: bool = False,
        submodel: Submodel | None = None,
        part_id: int = 0,
    ) -> FetchedModel:
        assert exact, "a follower measures the server's own model"
        return self._publisher.fetch(manifest_sha256, version, newer_than)


def versions(publisher: Publisher, **options: Any) -> list[int]:
    follower = Follower(Synthetic(), Following(publisher), Shard("test"), bell=publisher.time.bell, **options)
    return [m.version for m in follower]


def test_it_measures_every_version_to_the_last() -> None:
    assert versions(Publisher(5)) == [0, 1, 2, 3, 4, 5]


def test_it_says_that_the_run_has_ended() -> None:
    ends: list[str] = []
    assert versions(Publisher(2), on_end=lambda: ends.append("over")) == [0, 1, 2]
    assert ends == ["over"]
    versions(Publisher(2), once=True, on_end=lambda: ends.append("too early"))
    assert ends == ["over"]


def test_it_skips_what_is_overtaken() -> None:
    assert versions(Publisher(5, together=2)) == [0, 2, 4, 5]


@pytest.mark.parametrize(("every", "seen"), [(2, [0, 2, 4, 6, 7]), (3, [0, 3, 6, 7]), (100, [0, 7])])
def test_every_so_many_versions_and_the_last(every: int, seen: list[int]) -> None:
    assert versions(Publisher(7), every=every) == seen


class PutBack(Publisher):
    """A run that is put back to its beginning once, when it has published its fourth version."""

    def __init__(self, versions_max: int) -> None:
        super().__init__(versions_max)
        self._others = [Publisher(versions_max)]

    def publish(self) -> None:
        """One version more, or none and the run is at its beginning."""
        if self._others and self.server.engine.version == 4:
            self.server, self.device = self._others[0].server, self._others.pop().device
        else:
            super().publish()


@pytest.mark.parametrize(
    ("every", "seen"), [(1, [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 1, 4, 6]), (100, [0, 6])]
)
def test_it_goes_on_with_a_run_that_was_put_back(every: int, seen: list[int]) -> None:
    assert versions(PutBack(6), every=every) == seen


def test_once_is_once() -> None:
    assert versions(Publisher(7), once=True) == [0]


class Sink:
    """Remembers what is reported; refuses the first."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def report_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        if version == 0:
            raise Unavailable("the operators' port is closed")
        self.rows.append((version, dict(metrics)))


def test_it_reports_and_outlives_faults() -> None:
    publisher, sink = Publisher(2), Sink()
    errors: list[AnabranchError] = []
    transport = FaultyTransport(Following(publisher), [Fault("fetch", 2, FaultKind.LOST)])
    follower = Follower(
        Synthetic(),
        transport,
        Shard("test"),
        sink=sink,
        bell=publisher.time.bell,
        on_failure=errors.append,
    )
    measured = {m.version: dict(m.metrics) for m in follower}
    assert sorted(measured) == [0, 1, 2]
    assert sink.rows == [(1, measured[1]), (2, measured[2])]
    assert len(errors) == 2


def test_a_loss_that_is_not_finite_is_not_reported() -> None:
    class Diverged(Synthetic):
        def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
            return {"accuracy": 0.1, "loss": float("nan")}

    publisher, sink = Publisher(1), Sink()
    list(Follower(Diverged(), Following(publisher), Shard("test"), sink=sink, bell=publisher.time.bell))
    assert sink.rows == [(1, {"accuracy": 0.1})]


@pytest.mark.parametrize("goal", [AUTO_GOAL, Goal("accuracy", "max")], ids=["unnamed", "named"])
@pytest.mark.parametrize("once", [False, True])
def test_a_version_without_a_metric_is_passed_over_where_the_app_may_have_none(
    once: bool, goal: Goal
) -> None:
    class Picky(Synthetic):
        measures = False

        def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
            return {"accuracy": 0.1} if self.version == 1 else {}

    publisher, sink = Publisher(2), Sink()
    transport = Following(publisher)
    bell = publisher.time.bell
    follower = Follower(Picky(), transport, Shard("test"), sink=sink, bell=bell, once=once, goal=goal)
    found = [] if once else [(1, {"accuracy": 0.1})]
    assert [(m.version, m.metrics) for m in follower] == found
    assert sink.rows == found


# --- the trainer ---------------------------------------------------------------------------------


@pytest.fixture
def split() -> dict[str, Any]:
    tables = config(fleet={"clients": 3, "split": "speed-shards"}, run={"seed": 5}).to_json()
    return {name: tables[name] for name in ("run", "fleet", "client")}


def test_a_shard_is_cut_as_the_run_says(split: dict[str, Any]) -> None:
    shard = shard_of(split, 1)
    assert (shard.role, shard.index, shard.count, shard.seed) == ("train", 1, 3, 5)
    assert len(shard.speed_groups) == 3
    assert len(shard_of(split, 5, 6).speed_groups) == 6
    with pytest.raises(DataError, match="from 0 to 2"):
        shard_of(split, 3)


def test_the_first_difference_of_two_models_is_named() -> None:
    local = LocalTrainer(Synthetic(), ClientTable())
    local.adopt(ParamSpec.of(first_weights()))
    other = first_weights() | {"hidden.bias": np.zeros(33, np.float32)}
    with pytest.raises(ManifestMismatch, match=r"App has hidden.bias \(32,\) float32, the server .* \(33,\)"):
        local.adopt(ParamSpec.of(other))
    following = Following(Publisher(1))
    with pytest.raises(ManifestMismatch, match=r"App has hidden.bias \(32,\) float32, the server .* \(33,\)"):
        Follower(Synthetic(), following, Shard("test"), served=ParamSpec.of(other))


def test_a_device_says_what_it_is(tmp_path: Path) -> None:
    local = LocalTrainer(Synthetic(), ClientTable())
    examples = local.load(Shard("train", 0, 4))
    said = local.capability()
    assert (said.examples, said.accelerator, said.codecs) == (len(examples), "cpu", stages())
    assert said.memory_bytes > 2**28


def test_a_torch_app_is_counted_and_ended_between_steps() -> None:
    threads = torch.get_num_threads()
    local = LocalTrainer(load_app("digits"), ClientTable(device="cpu"), threads=1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    local.load(Shard("train", 0, 8))
    base = BaseModel(0, np.zeros(local.spec.size, np.float32), {})
    task = Task("t", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan(steps=50, batch_size=16))
    begun: list[int] = []

    def until_the_fourth() -> None:
        begun.append(len(begun))
        if len(begun) == 4:
            raise Cancelled

    with pytest.raises(Cancelled):
        local.train(task, "u", base, None, until_the_fourth)
    assert len(begun) == 4
    entry, _ = local.train(task, "u", base, None, lambda: None)
    assert entry.local_steps == 50
