"""Our ServerApp: it hears the app's own, runs it without rounds, and goes on where an earlier one stood."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flower_apps import FEDAVG, LEGACY_SERVER, NUMPY_CLIENT, write_app
from flwr.app import Message
from left import loggers_put_back

from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, ConfigError
from anabranch.flower import server_app
from anabranch.flower.local_grid import LocalGrid, Node, in_a_task
from anabranch.flower.logbook import Logbook
from anabranch.flower.messages import handled, new_context
from anabranch.flower.project import Project
from anabranch.reports.journal_files import JOURNAL, PAYLOADS
from anabranch.simulation.replay import replay_run


@pytest.fixture(autouse=True)
def task() -> Iterator[None]:
    with in_a_task(), loggers_put_back():  # where our log goes is Flower's to say in a process of its own
        yield


def options(out: Path, package: str, **more: Any) -> dict[str, Any]:
    given = {
        "serverapp": f"{package}.server_app:app",
        "out": str(out),
        "poll_s": 0.0,
        "run.updates_max": 9,
        "strategy.name": "fedbuff",
        "strategy.buffer_size": 3,
    }
    return {f"anabranch.{k}": v for k, v in {**given, **more}.items()}


def app_grid(folder: Path, count: int) -> tuple[LocalGrid, Project]:
    project = Project.read(folder)
    app, run_config = project.client_app(), project.fused({})
    contexts = {i + 1: new_context(i, count, run_config) for i in range(count)}

    def node(node_id: int) -> Node:
        return lambda message: handled(app, message, contexts[node_id], 1)

    return LocalGrid({node_id: node(node_id) for node_id in contexts}), project


@pytest.mark.parametrize(
    ("client", "server"), [(None, FEDAVG), (NUMPY_CLIENT, LEGACY_SERVER)], ids=["messages", "NumPyClient"]
)
def test_the_server_app_runs_an_app(client: str | None, server: str, tmp_path: Path) -> None:
    folder = write_app(tmp_path, client, server) if client else write_app(tmp_path)
    grid, project = app_grid(folder, 3)
    out = tmp_path / "run"
    given = {**project.fused({}), **options(out, folder.name)}
    server_app.main(grid, new_context(0, 3, given))
    assert replay_run(out).matches
    found = json.loads((out / "result.json").read_text())
    assert (found["updates_applied"], found["versions"], found["kind"]) == (9, 3, "live")
    assert (out / "final.safetensors").exists()
    assert (out / "report.html").exists()


def test_a_run_that_an_earlier_server_app_has_begun_goes_on(tmp_path: Path) -> None:
    folder = write_app(tmp_path)
    grid, project = app_grid(folder, 2)
    out = tmp_path / "run"
    given = {**project.fused({}), **options(out, folder.name, **{"run.trackers": "jsonl"})}
    answers = itertools.count()
    whole = dict(grid.nodes)

    def dying(node: Node) -> Node:
        def answer(message: Message) -> Message:
            if next(answers) == 8:
                raise KeyboardInterrupt
            return node(message)

        return answer

    grid.nodes = {i: dying(node) for i, node in whole.items()}
    with pytest.raises(KeyboardInterrupt):
        server_app.main(grid, new_context(0, 2, given))
    records = len((out / JOURNAL).read_text().splitlines())
    grid.nodes = whole
    server_app.main(grid, new_context(0, 2, given))
    assert replay_run(out).matches
    lines = (out / JOURNAL).read_text().splitlines()
    assert len(lines) > records > 3
    assert (out / PAYLOADS).exists()
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = json.loads((out / "result.json").read_text())["history"]
    assert [row["version"] for row in told] == [point["version"] for point in measured], "each told once"
    assert [row["loss"] for row in told] == [point["loss"] for point in measured]


class Silent(LocalGrid):
    """A Grid whose node 3 judges no trained version; how long the run waits is set with each message.

    Nobody is waited for once the others have answered.
    """

    def __init__(self, nodes: dict[int, Node], waits_s: Callable[[float], None]) -> None:
        super().__init__(nodes)
        self._waits_s = waits_s

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._waits_s(math.inf)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = {i: self._waiting[i].metadata for i in message_ids if i in self._waiting}
        judged = {i for i, asking in asked.items() if asking.message_type == "evaluate"}
        held = {i for i in judged if asked[i].dst_node_id == 3 and asked[i].group_id != "0"}
        if judged - held:
            self._waits_s(-1.0)
        return super().pull_messages([i for i in asked if i not in held])


@pytest.mark.parametrize(("every", "measured"), [(0, [3]), (2, [2, 3])], ids=["the last", "one before too"])
def test_a_node_that_does_not_answer_at_the_end_takes_no_word_from_the_others(
    every: int, measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is missing in the mean: of 10 and 20 examples with accuracies of 0 and 0.1."""
    folder = write_app(tmp_path)
    grid, project = app_grid(folder, 3)
    silent = Silent(grid.nodes, partial(monkeypatch.setattr, server_app, "LAST_WORD_S"))
    out = tmp_path / "run"
    more = {"run.evaluate_every_versions": every}
    server_app.main(silent, new_context(0, 3, {**project.fused({}), **options(out, folder.name, **more)}))
    history = json.loads((out / "result.json").read_text())["history"]
    assert [row["version"] for row in history if row["version"]] == measured
    assert history[-1]["accuracy"] == pytest.approx((10 * 0.0 + 20 * 0.1) / 30)


@pytest.mark.parametrize("falls", ["result", "rest"])
def test_a_run_that_dies_while_it_is_put_away_is_whole_all_the_same(
    falls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its result is there it goes on; and nobody looks for its payloads where half of them are."""
    folder = write_app(tmp_path)
    grid, project = app_grid(folder, 2)
    out = tmp_path / "run"
    given = {**project.fused({}), **options(out, folder.name)}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def killed(payloads: Path) -> None:
        next(payloads.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if falls == "result":
            patch.setattr(server_app, "write_model", full)
        else:
            patch.setattr(shutil, "rmtree", killed)
        with pytest.raises((OSError, KeyboardInterrupt)):
            server_app.main(grid, new_context(0, 2, given))
    if falls == "result":
        server_app.main(grid, new_context(0, 2, given))
    assert (out / "result.json").exists()
    assert replay_run(out).matches


def test_the_first_weights_are_on_the_disk_before_the_journal_that_speaks_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that fails then leaves no journal that cannot be gone on with."""
    written: list[str] = []
    flush = os.fsync

    def noted(descriptor: int) -> None:
        written.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".")[0])
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    tensors = {"w": np.zeros(3, np.float32)}
    with Logbook(tmp_path / "run", Config(), tensors):
        assert written[:3] == ["initial", "run", "journal"]


@pytest.mark.parametrize(
    ("more", "error", "why"),
    [
        ({"run.updates_max": 0}, ConfigError, r"set anabranch\.run\.updates_max"),
        ({"downlink.codec": "int8"}, ConfigError, "on Flower's Grid models travel whole"),
        ({"uplink.codec": "ef(0.9)|int9"}, ConfigError, r"^uplink.codec = 'ef.*unknown stage 'int9'"),
        ({"submodel.name": "random"}, ConfigError, "trains the whole model"),
        ({"run.initial": "built"}, ConfigError, "a node that builds one saves nothing"),
        ({"strategy.nane": "x"}, ConfigError, "nane"),
        ({"flower.run_config.lr": 2.0}, ConfigError, r"lr is 2\.0, but nodes have .* where it is None"),
        ({"serverapp": ""}, AppError, "must name the app's own ServerApp"),
        ({"serverapp": "json:dumps"}, AppError, "is a function, no ServerApp"),
        ({"serverapp": "no_such:app"}, AppError, "cannot be loaded"),
    ],
)
def test_options_of_no_use_are_refused(
    more: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    given = options(tmp_path / "run", "app", **more)
    with pytest.raises(error, match=why):
        server_app.main(LocalGrid({}), new_context(0, 1, given))
