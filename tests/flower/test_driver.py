"""Our engine over a Grid: nobody waits, nothing is lost, and a run that was cut off goes on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flwr.app import Array, ArrayRecord, Error, Message
from grid_runs import FIRST, Run, adding, config

from anabranch.core.errors import AppError, ConfigError, StoreCorrupt, StoreLocked
from anabranch.flower.local_grid import LocalGrid, in_a_task
from anabranch.flower.logbook import free_folder
from anabranch.flower.server_app import PRESETS
from anabranch.reports.journal_files import JOURNAL, PAYLOAD_FOLDER
from anabranch.simulation.replay import replay_run


@pytest.fixture(autouse=True)
def task() -> Iterator[None]:
    with in_a_task():
        yield


def test_a_run_ends_with_its_budget_and_replays(tmp_path: Path) -> None:
    begun = Run(tmp_path, {1: adding(1.0), 2: adding(2.0)})
    done = begun.steps()
    result = begun.result()
    assert (done.engine.version, result.updates_applied, result.history[-1].version) == (12, 12, 12)
    assert result.staleness.max >= 1
    assert {c: s.examples for c, s in result.clients.items()} == {"node-1": 30, "node-2": 30}
    assert replay_run(tmp_path).matches
    assert not (tmp_path / PAYLOAD_FOLDER).exists()


def test_the_arithmetic_is_the_strategys(tmp_path: Path) -> None:
    begun = Run(
        tmp_path,
        {1: adding(1.0)},
        config(strategy={"name": "fedbuff", "buffer_size": 3}, run={"updates_max": 6}),
    )
    run = begun.steps()
    begun.close()
    assert run.model()["w"].tolist() == [2.0] * 4
    assert run.model()["count"] == 3


@pytest.mark.parametrize("uplink", ["raw", "int8(16)"])
@pytest.mark.parametrize("policy", ["average", "latest"])
def test_a_norms_statistics_are_what_nodes_have_found(policy: str, uplink: str, tmp_path: Path) -> None:
    """Summed up as differences from 1 they would be 1 + 4 (0.1 - 1 + 0.3 - 1) / 2 at the first version."""
    bold = {"name": "fedbuff", "buffer_size": 2, "server_lr": 4.0}
    settings = config(strategy=bold, model={"buffers": policy}, uplink={"codec": uplink})
    nodes = {1: adding(1.0, variance=0.1), 2: adding(1.0, variance=0.3)}
    begun = Run(tmp_path, nodes, settings, {**FIRST, "norm.running_var": np.ones(3, np.float32)})
    run = begun.steps()
    begun.result()
    found = run.model()["norm.running_var"]
    assert 0.09 < found.min() <= found.max() < 0.31  # a code of 8 bits is not exact
    assert run.model()["w"][0] > 6, "weights take the server's learning rate"
    assert replay_run(tmp_path).matches


def test_a_round_is_the_version_that_will_come_of_it(tmp_path: Path) -> None:
    rounds: list[int] = []
    begun = Run(
        tmp_path, {1: adding(1.0, rounds)}, config(run={"updates_max": 3, "evaluate_every_versions": 0})
    )
    begun.steps()
    begun.close()
    assert rounds == [1, 2, 3, 3]  # the last is the evaluation of version 3, which is round 3's


def test_a_synchronous_strategy_works_as_well(tmp_path: Path) -> None:
    nodes = {i: adding(float(i)) for i in (1, 2, 3)}
    rounds = {"name": "fedavg", "clients_per_round": 3, "deadline_s": 100.0}
    begun = Run(tmp_path, nodes, config(strategy=rounds, run={"updates_max": 6}))
    run = begun.steps()
    begun.close()
    assert run.model()["w"].tolist() == [4.0] * 4


def test_a_node_that_fails_is_asked_less_and_less(tmp_path: Path) -> None:
    asked: list[float] = []

    def failing(message: Message) -> Message:
        asked.append(begun.clock.now)
        return Message(Error(5, "node unavailable"), reply_to=message)

    begun = Run(
        tmp_path, {1: adding(1.0), 2: failing}, config(run={"updates_max": 40, "evaluate_every_versions": 0})
    )
    begun.steps()
    begun.close()
    gaps = np.diff(asked[:-1])  # the last is the evaluation
    assert len(gaps) >= 3
    assert all(b > 1.5 * a for a, b in itertools.pairwise(gaps))
    assert begun.run.engine.counters.leases_lost == len(asked) - 1


@pytest.mark.parametrize("some_answer", [False, True])
def test_a_grid_on_all_of_whose_nodes_the_app_fails_ends_the_run(some_answer: bool, tmp_path: Path) -> None:
    """After so many failures in a row; who answers in between begins the count anew."""
    asked: list[int] = []

    def failing(message: Message) -> Message:
        asked.append(message.metadata.dst_node_id)
        return Message(Error(2, "the app raised"), reply_to=message)

    settings = config(run={"updates_max": 30, "rejections_max": 6, "evaluate_every_versions": 0})
    begun = Run(tmp_path, {1: adding(1.0) if some_answer else failing, 2: failing}, settings)
    if some_answer:
        begun.steps()
        assert len(asked) - 1 > 4, "the last is the evaluation"
    else:
        told = r"^the last 6 tasks all failed, the newest on node-\d: .*the app raised.*rejections_max"
        with pytest.raises(AppError, match=told):
            begun.steps()
        assert set(asked) == {1, 2}
    begun.close()


@pytest.mark.parametrize("code", [3, 4, 5], ids=["message", "reply", "node"])
def test_nodes_that_are_all_away_for_a_while_end_nothing(code: int, tmp_path: Path) -> None:
    away = dict.fromkeys(range(1, 13), 2)  # how often each does not answer

    def back_later(message: Message) -> Message:
        node = message.metadata.dst_node_id
        if away[node]:
            away[node] -= 1
            return Message(Error(code, "unavailable"), reply_to=message)
        return adding(1.0)(message)

    settings = config(run={"updates_max": 30, "rejections_max": 6, "evaluate_every_versions": 0})
    begun = Run(tmp_path, dict.fromkeys(away, back_later), settings)
    begun.steps()
    begun.close()
    assert begun.run.engine.counters.applied == 30


@pytest.mark.parametrize(
    ("flaw", "applied"),
    [
        (lambda a: {**a, "w": np.full(4, np.nan, np.float32)}, False),
        (lambda a: {**a, "w": np.zeros(5, np.float32)}, False),
        (lambda a: {"w": a["w"]}, False),
        (lambda a: {**a, "more": a["w"]}, False),
        (lambda a: {**a, "w": a["w"].astype(np.float64) + 1}, True),
    ],
    ids=["no numbers", "another shape", "one too few", "one too many", "another dtype"],
)
def test_a_reply_of_no_use_changes_nothing(
    flaw: Callable[[dict[str, Any]], dict[str, Any]],
    applied: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    honest = adding(1.0)

    def wrong(message: Message) -> Message:
        reply = honest(message)
        if message.metadata.message_type == "train":
            arrays = flaw({n: a.numpy() for n, a in message.content["arrays"].items()})
            reply.content["arrays"] = ArrayRecord({n: Array(np.asarray(a)) for n, a in arrays.items()})
        return reply

    begun = Run(tmp_path, {1: honest, 2: wrong})
    begun.steps()
    result = begun.result()
    assert (result.clients["node-2"].updates > 0) is applied
    assert ("node-2: " in caplog.text) is not applied, "what is wrong with it is said"
    assert np.isfinite(begun.run.model()["w"]).all()
    assert replay_run(tmp_path).matches


def test_where_places_are_few_every_node_has_its_turn(tmp_path: Path) -> None:
    teasq = {"name": "teasq", "cache_size": 2, "concurrency_fraction": 0.1}
    begun = Run(tmp_path, {i: adding(1.0) for i in range(1, 5)}, config(strategy=teasq))
    begun.steps()
    assert {share.updates for share in begun.result().clients.values()} == {3}


def test_nodes_come_and_go(tmp_path: Path) -> None:
    begun = Run(tmp_path, {}, config(run={"updates_max": 9}))
    nodes = [{}, {1: adding(1.0)}, {1: adding(1.0), 2: adding(1.0)}, {2: adding(1.0)}, {}]
    for there in itertools.islice(itertools.cycle(nodes), 300):
        begun.grid.nodes = there
        begun.run.step()
        if begun.run.done:
            break
    assert begun.run.engine.counters.applied == 9
    assert len(begun.run.engine.ledger.clients) == 2
    begun.close()


class Deaf(LocalGrid):
    """A Grid that loses every reply of node 2."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        kept = [
            i for i in message_ids if (m := self._waiting.get(i)) is not None and m.metadata.dst_node_id != 2
        ]
        return super().pull_messages(kept)


def test_a_reply_that_never_comes_costs_its_lease_and_no_more(tmp_path: Path) -> None:
    short = {"lease_s": 10.0, "lease_min_s": 10.0, "lease_max_s": 10.0}
    begun = Run(
        tmp_path,
        {1: adding(1.0), 2: adding(1.0)},
        config(run={"updates_max": 60, "evaluate_every_versions": 0}, server=short),
    )
    begun.run._grid = begun.grid = Deaf(begun.grid.nodes)
    while not begun.run.engine.finished:
        begun.run.step()
    begun.close()
    assert begun.run.engine.counters.leases_lost >= 1
    assert len(begun.run._tasks) <= 2


# --- a process that dies ---------------------------------------------------------------------


def whole_run(folder: Path) -> tuple[bytes, Any]:
    begun = Run(folder, {1: adding(1.0), 2: adding(2.0)})
    begun.steps()
    begun.close()
    return (folder / JOURNAL).read_bytes(), begun.run


def test_a_run_that_was_cut_off_anywhere_goes_on(tmp_path: Path) -> None:
    journal, _ = whole_run(tmp_path / "whole")
    ends = [i + 1 for i, byte in enumerate(journal) if byte == ord("\n")]
    cuts = [*ends, *(end - 7 for end in ends[2::5])]
    for cut in cuts:
        folder = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / JOURNAL).write_bytes(journal[:cut])
        again = Run(folder, {1: adding(1.0), 2: adding(2.0)})
        applied = sum(
            '"kind":"update"' in line
            for line in journal[: journal.rfind(b"\n", 0, cut) + 1].decode().splitlines()
        )
        assert again.run.engine.counters.applied == applied
        again.steps()
        again.result()
        assert again.run.engine.counters.applied == 12
        assert replay_run(folder).matches
        shutil.rmtree(folder)


def test_a_cut_before_the_first_line_begins_anew(tmp_path: Path) -> None:
    journal, _ = whole_run(tmp_path)
    (tmp_path / JOURNAL).write_bytes(journal[:20])
    again = Run(tmp_path, {1: adding(1.0)})
    assert again.run.engine.counters.applied == 0
    again.steps()
    again.close()


def test_measurements_are_there_again(tmp_path: Path) -> None:
    _, run = whole_run(tmp_path)
    again = Run(tmp_path, {})
    assert again.run.done
    result = again.result()
    assert [p.version for p in result.history][-1] == run.engine.version
    assert len(result.history) >= 3


def test_a_payload_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    whole_run(tmp_path)
    victim = next((tmp_path / PAYLOAD_FOLDER).iterdir())
    victim.write_bytes(b"\0" + victim.read_bytes()[1:-1] + b"\7")
    with pytest.raises(StoreCorrupt, match="other bytes than were journalled"):
        Run(tmp_path, {})
    victim.unlink()
    with pytest.raises(StoreCorrupt, match="is not in the run's folder"):
        Run(tmp_path, {})


def test_two_processes_never_write_one_journal(tmp_path: Path) -> None:
    begun = Run(tmp_path, {})
    with pytest.raises(StoreLocked, match=r"give this one another anabranch\.out"):
        Run(tmp_path, {})
    begun.close()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"secagg": {"mode": "keeper", "keepers": ["ab" * 32], "clip": 1.0}}, "nothing of this run masks"),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "participations": 4}}, "no key for the noise here"),
    ],
)
def test_nodes_of_flower_neither_mask_nor_have_a_place_for_a_key(
    tmp_path: Path, table: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Run(tmp_path, {}, config(strategy={"name": "fedbuff", "buffer_size": 2}, **table))


def test_another_configuration_is_another_run(tmp_path: Path) -> None:
    whole_run(tmp_path)
    with pytest.raises(ConfigError, match=r'settings: strategy.name is "fedasync" there and "fedbuff" here:'):
        Run(tmp_path, {}, config(strategy={"name": "fedbuff"}))


def test_a_run_of_an_older_release_goes_on_by_the_value_that_is_named(tmp_path: Path) -> None:
    Run(tmp_path, {}).close()
    of_nodes = PRESETS["server"]
    with pytest.raises(ConfigError, match=r'server.windows is "minute" there and "places" here: give'):
        Run(tmp_path, {}, config(server={**of_nodes, "windows": "places"}))
    Run(tmp_path, {}, config(server={**of_nodes, "windows": "minute"})).close()


def test_a_run_that_has_ended_keeps_its_folder(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    begun = Run(tmp_path / "run", {1: adding(1.0)})
    begun.steps()
    begun.result()
    assert free_folder(tmp_path / "run") == tmp_path / "run-2"
