"""Compressed updates over a Grid: what the mod sends, what it remembers, what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flower_apps import write_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from grid_runs import Run, adding, config

from anabranch.core.errors import AppError
from anabranch.core.events import Payload
from anabranch.core.model.params import ParamSpec, Vector, dense
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.flower.client_app import app as compressed_app
from anabranch.flower.compression import MEMORY, RECORD, Counting, Encoded, compressed_uplink, encoded_in
from anabranch.flower.local_grid import Node, in_a_task
from anabranch.flower.messages import TRAIN, Reply, new_context, new_message
from anabranch.flower.packing import ASYNCHRONOUS, BASELINE, COMPRESSED, pack
from anabranch.flower.server_app import Options
from anabranch.host.submission import decode
from anabranch.reports.journal_files import JournalReader
from anabranch.simulation.replay import replay_run

RNG = np.random.default_rng(3)
LARGE = {"w": RNG.standard_normal((64, 128)).astype(np.float32), "steps": np.array(3)}
CHAIN = "ef(1)|topk(0.1)|int8"
SPEC = ParamSpec.of(LARGE)
STEP = RNG.standard_normal((64, 128)).astype(np.float32)


@pytest.fixture(autouse=True)
def flower_task() -> Iterator[None]:
    with in_a_task():
        yield


def task(number: int = 0, uplink: str = CHAIN) -> Task:
    return Task(f"t{number}", "node-1", number, 0.0, 9.0, 9.0, number, LocalPlan(), uplink)


def moving(message: Message, _: Context) -> Message:
    """A ClientApp that always moves its model by STEP; a Grid's record is nothing to it."""
    assert list(message.content.config_records) == ["config"]
    arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
    arrays["w"] = arrays["w"] + STEP
    return replied(message, arrays)


def replied(message: Message, arrays: dict[str, Any]) -> Message:
    record = ArrayRecord({n: Array(np.asarray(a)) for n, a in arrays.items()})
    return Message(RecordDict({"arrays": record}), reply_to=message)


def told(order: ConfigRecord | None) -> Message:
    record = ArrayRecord({n: Array(a) for n, a in LARGE.items()})
    content = RecordDict({"arrays": record, "config": ConfigRecord({"server-round": 1})})
    if order is not None:
        content[RECORD] = order
    return new_message(content, TRAIN, 7, "1")


def sent(node: Context, counting: Counting, number: int) -> np.ndarray[Any, Any]:
    """What the server decodes of the node's reply to a task."""
    reply = compressed_uplink(told(counting.order(task(number))), node, moving)
    encoded = encoded_in(reply.content["arrays"])
    assert encoded is not None
    assert len(encoded.data) < LARGE["w"].nbytes / 7
    return decoded(encoded).reshape(64, 128)


def decoded(encoded: Encoded) -> Vector:
    """The values of what a node has sent."""
    return dense(decode(Payload("", len(encoded.data), encoded.codec), encoded.data, SPEC, None))


def test_what_one_update_left_out_is_in_the_next() -> None:
    node, counting, total = new_context(0, 1, {}), Counting(), np.zeros((64, 128))
    for number in range(40):
        total += sent(node, counting, number)
        counting.answered(f"t{number}", taken=True)
        assert len(memories(node)) <= 2
    alone = sent(new_context(0, 1, {}), Counting(), 0)
    assert error(total / 40) < 0.2 < 0.6 < error(alone)


def error(found: np.ndarray[Any, Any]) -> float:
    """The share of STEP that is not there."""
    return float(np.abs(found - STEP).mean() / np.abs(STEP).mean())


def test_what_a_rejected_update_left_out_is_forgotten() -> None:
    node, counting = new_context(0, 1, {}), Counting()
    without_any = sent(node, counting, 0)
    counting.answered("t0", taken=True)
    first = sent(node, counting, 1)
    counting.answered("t1", taken=False)
    second = sent(node, counting, 1)
    assert memories(node) == {"t0", "t1"}
    assert second.tolist() == first.tolist() != without_any.tolist()
    counting.answered("t1", taken=True)
    assert sent(node, counting, 2).tolist() != first.tolist()


def test_an_update_that_waits_for_its_answer_counts_meanwhile() -> None:
    node, counting = new_context(0, 1, {}), Counting()
    for number in range(3):
        sent(node, counting, number)
    assert counting.task_ids == ["t0", "t1", "t2"]
    assert memories(node) == {"t0", "t1", "t2"}
    counting.answered("t1", taken=True)
    counting.answered("t0", taken=False)
    assert counting.task_ids == ["t1", "t2"]


def memories(node: Context) -> set[str]:
    return {name.removeprefix(MEMORY) for name in node.state if name.startswith(MEMORY)}


def test_a_chain_without_feedback_remembers_nothing() -> None:
    node = new_context(0, 1, {})
    reply = compressed_uplink(told(Counting().order(task(uplink="int8"))), node, moving)
    found = encoded_in(reply.content["arrays"])
    assert found is not None
    assert np.allclose(decoded(found.checked(task(uplink="int8"), SPEC)), STEP.ravel(), atol=0.05)
    assert not node.state


@pytest.mark.parametrize(
    "arrays",
    [
        {"w": np.full((64, 128), np.nan, np.float32), "steps": np.array(3)},
        {"w": np.zeros(5, np.float32), "steps": np.array(3)},
        {"w": LARGE["w"]},
    ],
    ids=["no numbers", "another shape", "one too few"],
)
def test_a_reply_that_cannot_be_encoded_goes_as_it_is(arrays: dict[str, Any]) -> None:
    def broken(message: Message, _: Context) -> Message:
        return replied(message, arrays)

    reply = compressed_uplink(told(Counting().order(task())), new_context(0, 1, {}), broken)
    assert {n: a.numpy().shape for n, a in reply.content["arrays"].items()} == {
        n: a.shape for n, a in arrays.items()
    }


def test_without_an_order_and_with_an_error_the_mod_does_nothing() -> None:
    def failing(message: Message, _: Context) -> Message:
        return Message(Error(2, "it failed"), reply_to=message)

    node = new_context(0, 1, {})
    assert compressed_uplink(told(Counting().order(task())), node, failing).has_error()
    assert encoded_in(compressed_uplink(told(None), node, moving).content["arrays"]) is None


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (Encoded("int4", b"1234"), "the task asked for 'topk"),
        (Encoded("topk(0.1)|int8", bytes(99_000)), "needs at most"),
    ],
)
def test_bytes_that_nobody_asked_for_are_refused(encoded: Encoded, why: str) -> None:
    with pytest.raises(AppError, match=why):
        encoded.checked(task(), SPEC)


# --- with the engine -------------------------------------------------------------------------


def behind_the_mod(node: Node) -> Node:
    context = new_context(0, 1, {})
    return lambda message: compressed_uplink(message, context, lambda m, _: node(m))


def run_of(folder: Path, nodes: dict[int, Node], strategy: dict[str, Any], uplink: str) -> Any:
    begun = Run(folder, nodes, config(strategy=strategy, uplink={"codec": uplink}), LARGE)
    begun.steps()
    model, result = begun.run.model(), begun.result()
    assert replay_run(folder).matches
    return model, result


def test_teasq_over_a_grid_is_whole(tmp_path: Path) -> None:
    teasq = {"name": "teasq", "cache_size": 2, "concurrency_fraction": 1.0}
    nodes = {1: behind_the_mod(adding(1.0)), 2: behind_the_mod(adding(1.0))}
    model, result = run_of(tmp_path / "compressed", nodes, teasq, "auto")
    whole_model, whole = run_of(tmp_path / "whole", {1: adding(1.0), 2: adding(1.0)}, teasq, "raw")
    assert (result.versions, result.updates_applied) == (whole.versions, whole.updates_applied) == (6, 12)
    assert result.uplink_bytes < whole.uplink_bytes / 10
    # 5 % of the values at a time, so it is on its way: no value has gone too far or the wrong one.
    moved = model["w"] - LARGE["w"]
    assert 0 < moved.mean() < (whole_model["w"] - LARGE["w"]).mean() + 0.01
    assert moved.min() > -0.01
    assert model["steps"] == 3


def test_a_node_without_the_mod_takes_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = {1: behind_the_mod(adding(1.0)), 2: adding(1.0)}
    model, result = run_of(tmp_path, nodes, {"name": "fedasync"}, "ef(0.9)|int8")
    assert result.updates_applied == 12
    assert {c for c, share in result.clients.items() if share.updates} == {"node-1", "node-2"}
    assert np.ptp(model["w"] - LARGE["w"]) < 0.1
    said = [record.getMessage() for record in caplog.records if "sends whole arrays" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("node-2")


def lying(node: Node) -> Node:
    """Answers with bytes of another chain."""

    def answer(message: Message) -> Message:
        reply = node(message)
        if message.metadata.message_type == TRAIN:
            reply.content["arrays"] = ArrayRecord({"update": Array("uint8", (4,), "anabranch.int4", b"1234")})
        return reply

    return answer


def test_a_node_that_sends_other_bytes_has_failed(tmp_path: Path) -> None:
    nodes = {1: behind_the_mod(adding(1.0)), 2: lying(adding(1.0))}
    _, result = run_of(tmp_path, nodes, {"name": "fedasync"}, "int8")
    assert result.updates_applied == 12
    assert result.clients["node-1"].updates == 12


def test_damaged_bytes_are_on_record_with_their_flaw(tmp_path: Path) -> None:
    """As they are on a server: the task is closed, and whoever replays finds them."""

    def cut(message: Message) -> Message:
        reply = honest(message)
        if message.metadata.message_type == TRAIN:
            (array,) = reply.content["arrays"].values()
            short = Array("uint8", (len(array.data) - 3,), array.stype, array.data[:-3])
            reply.content["arrays"] = ArrayRecord({"update": short})
        return reply

    honest = behind_the_mod(adding(1.0))
    _, result = run_of(tmp_path, {1: behind_the_mod(adding(1.0)), 2: cut}, {"name": "fedasync"}, "int8")
    updates = [r for _, r in JournalReader(tmp_path).records() if r["kind"] == "update"]
    damaged = [bool(r["flaw"]) for r in updates]
    assert damaged == [r["client_id"] == "node-2" for r in updates]
    assert result.clients["node-2"].rejected == sum(damaged) > 0


def test_a_packed_app_with_a_codec_has_the_mod(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    tables: dict[str, dict[str, Any]] = {"run": {"updates_max": 5}, "uplink": {"codec": "int8"}}
    packed = pack(app, tmp_path / "packed", ASYNCHRONOUS, tmp_path / "run", tables)
    assert packed.clientapp == COMPRESSED
    assert Options.of(packed.run_config).config.uplink.codec == "int8"
    node = new_context(1, 2, packed.run_config)
    packed.client_app()  # its folder is on the import path from now on
    message = told(Counting().order(task(uplink="int8")))
    message.content["config"] = ConfigRecord({"lr": 0.5, "server-round": 1})
    reply = Reply.of(compressed_app(message, node), TRAIN)
    assert reply.encoded is not None
    assert np.allclose(decoded(reply.encoded), 1.0, atol=0.05)
    assert reply.metrics["tasks"] == 1


@pytest.mark.parametrize(
    ("serverapp", "tables"),
    [(ASYNCHRONOUS, {"run": {"updates_max": 1}}), (BASELINE, {"uplink": {"codec": "int8"}})],
)
def test_other_packed_apps_keep_their_client_app(serverapp: str, tables: Any, tmp_path: Path) -> None:
    app = write_app(tmp_path)
    packed = pack(app, tmp_path / "packed", serverapp, tmp_path / "run", tables)
    assert packed.clientapp == f"{app.name}.client_app:app"


@pytest.mark.parametrize(
    ("config", "why"),
    [({}, 'write "module:attribute"'), ({"anabranch.clientapp": "json:dumps"}, "no ClientApp")],
)
def test_a_compressed_app_without_its_own_says_so(config: dict[str, Any], why: str) -> None:
    call: Callable[..., Message] = compressed_app
    with pytest.raises(AppError, match=why):
        call(told(None), new_context(0, 1, config))
