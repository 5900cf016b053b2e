"""A server whose own strategy breaks: the update is in its log, and mended code goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from kept_state import LIMITS, SPEC, Life, config_of
from own_parts import forgotten

from anabranch.core.errors import AppError
from anabranch.server.manifest import Manifest
from anabranch.server.recovery import recover
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.registry import STRATEGIES
from anabranch.testing.models import tensors

SETTINGS = {"strategy": {"name": "mended"}}
FIRST, LAST = 0, 9  # turns of devices


@dataclass(frozen=True)
class Remembered:
    updates: int = 0
    devices: Any = None


@dataclass(frozen=True)
class Mended(MixingStrategy):
    """Without a fault: what the next ones have come to once they are mended."""

    name: ClassVar[str] = "mended"
    state_type: ClassVar[type[Any]] = Remembered

    def weight(self, update: Any, context: Any) -> float:
        return 0.5

    def init(self, vector: Any) -> Remembered:
        return Remembered(0, [])

    def step(self, state: Any, vector: Any, update: Any, context: Any) -> Any:
        step = super().step(state, vector, update, context)
        return replace(step, state=Remembered(state.updates + 1, [*state.devices, update.client_id]))


class NotFinite(Mended):
    """The third version has a value that is none: it is not one of those after which states are looked at."""

    def step(self, state: Any, vector: Any, update: Any, context: Any) -> Any:
        step = super().step(state, vector, update, context)
        assert step.vector is not None
        if step.state.updates == 3:
            step.vector[0] = np.nan
        return step


class NoData(Mended):
    """From the third update on its state is none that a restart could read."""

    def step(self, state: Any, vector: Any, update: Any, context: Any) -> Any:
        step = super().step(state, vector, update, context)
        if step.state.updates < 3:
            return step
        return replace(step, state=replace(step.state, devices=set(step.state.devices)))


class Moved(Mended):
    """The same models, and another state: as one that remembers what no event says."""

    def init(self, vector: Any) -> Remembered:
        return Remembered(0, ["somebody"])


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with forgotten():
        yield


def served(strategy: type[Any], folder: Path) -> Life:
    """A server with this release of the strategy's code."""
    STRATEGIES._let_in["mended"] = strategy
    return Life("mended", folder, SETTINGS)


def started_again(folder: Path) -> None:
    """As far as it comes."""
    with closing(open_store("", folder, LIMITS)) as store:
        recover(store, config_of("mended", SETTINGS), Manifest("test", SPEC, tensors()), LIMITS)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (NotFinite, "version 3 has values that are not finite"),
        (NoData, "the state would not outlive a restart"),
    ],
)
def test_it_ends_at_each_start_until_the_code_is_mended_and_goes_on_to_the_bit(
    tmp_path: Path, broken: type[Any], told: str
) -> None:
    """Who starts it again may not have read why it ended: nothing of it may be served."""
    life = served(broken, tmp_path / "own")
    with pytest.raises(AppError, match=f"^strategy 'mended': {told}"):
        life.play(FIRST, LAST)
    life.close()
    with pytest.raises(AppError, match=f"^strategy 'mended': {told}"):
        started_again(tmp_path / "own")

    life = served(Mended, tmp_path / "own")
    found = life.books.engine
    whole = served(Mended, tmp_path / "whole")
    logged = [record for _, record in life.store.records(0)]
    whole.play(FIRST, LAST)
    assert logged == [record for _, record in whole.store.records(0)][: len(logged)]
    assert found.version == found.state.updates >= 3
    assert found.state.devices == whole.books.engine.state.devices[: found.version]
    life.close()
    whole.close()


def test_a_snapshot_that_a_part_of_ones_own_gives_no_more_is_told_with_its_name(tmp_path: Path) -> None:
    """As nothing of the data need be damaged: its models come out as they were."""
    life = served(Mended, tmp_path / "own")
    life.play(FIRST, LAST)
    life.books.flush(life.now)
    version = life.books.engine.version
    life.close()
    assert verify(tmp_path / "own", whole=True).problems == ()
    STRATEGIES._let_in["mended"] = Moved
    snapshot = f"the newest snapshot, of version {version}, is not what the log replays to"
    own = "strategy 'mended' gives other results than it gave: it draws, reads a clock, or was changed"
    assert verify(tmp_path / "own", whole=True).problems == (f"{snapshot}; or {own}",)
