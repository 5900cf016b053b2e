"""Data that arrive on a live device, as its App says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.core.errors import DataError
from anabranch.testing.federation import config
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.calls import arrived_of

EXAMPLES = Examples(np.arange(6.0)[:, None], np.arange(6))


class Meter(App):
    """What is there is what comes next of `looks`; the sum of what it saw is added to its weight."""

    name = "meter"

    def __init__(self, looks: list[Any]) -> None:
        super().__init__()
        self.looks, self.times, self.seen = looks, [], []  # type: list[Any], list[float], list[list[int]]

    def model(self) -> Any:
        return {"w": np.zeros(1, np.float32)}

    def data(self, shard: Shard) -> Examples:
        return EXAMPLES

    def arrived(self, examples: Examples, now: float) -> Any:
        self.times.append(now)
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def train(self, model: Any, examples: Examples, plan: Any, seed: int) -> dict[str, float]:
        self.seen.append(examples.y.tolist())
        model["w"] += np.float32(examples.y.sum())
        return {}

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        return {"loss": 0.0}


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ([4, 1], [4, 1]),
        (range(2, 4), [2, 3]),
        (np.array([True, False, False, False, False, True]), [0, 5]),
        (Examples(np.array([[9.0]]), np.array([9])), [9]),
        ([], None),
        (range(0), None),
        (np.zeros(6, bool), None),
    ],
)
def test_what_an_app_says_has_come(said: Any, rows: list[int] | None) -> None:
    found = arrived_of(Meter([said]), EXAMPLES, 1.0)
    assert (None if found is None else found.y.tolist()) == rows


@pytest.mark.parametrize("said", [[6], [0.5], "all", np.array([True]), {"x": 1}, 5.0])
def test_what_is_no_rows_is_an_error_that_names_the_method(said: Any) -> None:
    with pytest.raises(DataError, match=r"meter\.arrived returned a .* no rows of its 6 examples"):
        arrived_of(Meter([said]), EXAMPLES, 1.0)


def test_a_device_waits_for_its_first_example_and_trains_on_what_is_there(tmp_path: Path) -> None:
    """Looks in turn: before an ask and at a training. At the first there is nothing, so nothing is asked."""
    told: list[tuple[str, dict[str, Any]]] = []
    meter = Meter([[], [0], [0, 1], [0, 1, 2], [3], [], None])
    server = LocalServer.of(Meter([None]), config(run={"updates_max": 3}, strategy={"name": "fedasync"}))
    agent = Agent(
        meter,
        LocalTransport(server, "d"),
        "d",
        Shard("train"),
        tmp_path,
        on_event=lambda kind, **words: told.append((kind, words)),
    )
    assert agent.run().applied == 3
    assert meter.seen[:2] == [[0, 1], [3]], "and where there is nothing any more, what there was"
    refused = [words["detail"] for kind, words in told if kind == "refused"]
    assert refused[0] == "none of this device's examples is there yet"
    examples = [record["examples"] for record in server.journal if record["kind"] == "update"]
    assert examples == [len(seen) for seen in meter.seen]
    assert meter.times == sorted(meter.times)
    assert meter.times[0] > 1.7e9, "seconds since 1970"
