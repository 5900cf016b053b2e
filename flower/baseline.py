"""The app's own ServerApp under `flwr run`, written down: what Flower makes of an app, to compare with.

Nothing is changed but the Grid that the ServerApp is given: it passes everything on, and counts. So
`result.json` and the report are those of any run. A version is a round whose replies have come; times are
real. What the ServerApp itself judges, where nobody else does, is in no message: its frames have it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anabranch.core.config.flower import FlowerTable
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import build
from anabranch.core.errors import AnabranchError, AppError
from anabranch.core.model.params import ParamSpec, Tensors, digest
from anabranch.core.model.updates import Decision, Verdict
from anabranch.flower.installed import flwr_version

flwr_version()

from flwr.app import Context, Message, RecordDict  # noqa: E402 - the environment is set by then
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402

from anabranch.flower.app import named, weighted_mean  # noqa: E402
from anabranch.flower.messages import (  # noqa: E402
    EVALUATE,
    EXAMPLES_KEYS,
    ROUND_KEYS,
    TRAIN,
    told_by,
)
from anabranch.flower.played import Played, StrategyOutcome, outcome_in, played_in  # noqa: E402
from anabranch.flower.project import load  # noqa: E402
from anabranch.flower.records import NPY, arrays_of  # noqa: E402
from anabranch.flower.server_app import PREFIX, unflattened  # noqa: E402
from anabranch.reports.folders import claimed  # noqa: E402
from anabranch.reports.html import write_report  # noqa: E402
from anabranch.reports.models import BEST, FINAL, Best, write_model  # noqa: E402
from anabranch.reports.origin import reason  # noqa: E402
from anabranch.reports.recorder import EVENTS_FILE, Recorder  # noqa: E402
from anabranch.reports.result import FLOWER, Status  # noqa: E402

log = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the app's own ServerApp to its end, and write down what it came to."""
    own = {k[len(PREFIX) :]: v for k, v in context.run_config.items() if k.startswith(PREFIX)}
    tables = unflattened(own)
    serverapp = load(str(tables.get("serverapp", "")))
    with claimed(Path(str(tables.get("out") or "runs/flower-baseline")), explicit=False) as folder:
        _run(serverapp, grid, context, tables, folder)


def _run(serverapp: ServerApp, grid: Grid, context: Context, tables: Mapping[str, Any], folder: Path) -> None:
    run_config = {k: v for k, v in context.run_config.items() if not k.startswith(PREFIX)}
    run = tables.get("run", {})
    recorder = Recorder(
        strategy=FLOWER,
        workload=str(run.get("workload", "flower")),
        seed=int(run.get("seed", 0)),
        goal=Goal.of_json(tables),
        config={"run": run, "flower": {"run_config": run_config}},
        kind="live",
        events_path=folder / EVENTS_FILE,
    )
    with recorder:
        counting = CountingGrid(grid, recorder, build(FlowerTable, tables.get("flower", {}), "flower"))
        began = time.perf_counter()
        try:
            serverapp(counting, context)
            counting.finish()
        except BaseException as error:
            _leave(counting, recorder, folder, began, "interrupted", reason(error))
            raise
        _leave(counting, recorder, folder, began)


def _leave(
    counting: CountingGrid,
    recorder: Recorder,
    folder: Path,
    began: float,
    status: Status = "finished",
    why: str = "",
) -> None:
    """Write the result, its page and the models."""
    model = counting.model()
    sha256 = digest(recorder.spec.flatten(model)) if recorder.spec and model else ""
    result = recorder.result(sha256, "", time.perf_counter() - began, status, why)
    if model:
        write_model(folder / FINAL, model, result.versions)
    if counting.best.model is not None and counting.best.version is not None:
        write_model(folder / BEST, counting.best.model, counting.best.version, counting.best.metrics)
    result.write(folder)
    write_report(result, folder)


class CountingGrid(Grid):
    """A Grid that tells a recorder what passes through it, and is in nobody's way, whatever that is.

    `flower` names the accuracy and the loss, and says who judges. It is made in the thread that plays the
    ServerApp.
    """

    def __init__(self, grid: Grid, recorder: Recorder, flower: FlowerTable) -> None:
        self._grid, self._recorder, self._flower = grid, recorder, flower
        self._began, self._thread = time.perf_counter(), threading.get_ident()
        self._lock = threading.Lock()  # the legacy API sends each message from a thread of its own
        self._phase = ("", "")  # what is sent at the moment: its type and its round
        self._out: set[str] = set()  # the messages of it that are under way and will be pulled
        self._asked: set[int] = set()  # the nodes that have one of it
        self._round, self._came, self._last_s = 0, 0, 0.0
        self._judged: list[tuple[float, dict[str, float]]] = []  # the weight of each reply, and its metrics
        self._played = Played()
        self._outcome: StrategyOutcome | None = None
        self._known: set[int] = set()  # the rounds whose central metrics were looked at
        self._sent: Tensors = {}  # the model as it was sent last
        self._is_unnamed = False
        self.best: Best[Tensors] = Best(recorder.goal)

    # --- Flower's own ------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """See `Grid`."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """See `Grid`."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See `Grid`; deprecated there."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See `Grid`."""
        return list(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See `Grid`."""
        sent = list(messages)
        self._told(sent)
        ids = list(self._grid.push_messages(sent))
        with self._lock:
            self._out.update(ids)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See `Grid`."""
        replies = list(self._grid.pull_messages(message_ids))
        self._heard(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See `Grid`."""
        sent = list(messages)
        self._told(sent)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._heard(replies)
        return replies

    # --- what is counted ---------------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _told(self, sent: Iterable[Message]) -> None:
        with self._lock:
            told = [message for message in sent if message.metadata.message_type in (TRAIN, EVALUATE)]
            # A loop of one's own need say no round: then there is a new one once all have answered, or
            # once one of them is sent another message, as where a straggler is not waited for.
            is_next = not self._out or any(m.metadata.dst_node_id in self._asked for m in told)
            for message in told:
                what, node_id = message.metadata.message_type, message.metadata.dst_node_id
                phase, client = (what, _round_of(message)), f"node-{node_id}"
                if phase != self._phase or (is_next and not phase[1]):
                    self._conclude()
                    self._phase = phase
                    self._begin(message.content)
                is_next = False
                self._asked.add(node_id)
                if what == TRAIN:
                    self._recorder.granted(self._now(), client, message.metadata.message_id, self._round)
                    self._recorder.downloaded(self._now(), client, _array_bytes(message.content))

    def _heard(self, replies: Iterable[Message]) -> None:
        with self._lock:
            for message in replies:
                self._out.discard(message.metadata.reply_to_message_id)
                self._take(message)

    def _take(self, message: Message) -> None:
        what, client = message.metadata.message_type, f"node-{message.metadata.src_node_id}"
        if what not in (TRAIN, EVALUATE):
            return
        try:
            metrics = told_by(message, what)
        except AppError as error:
            self._recorder.note(self._now(), "failed", client=client, why=str(error))
            return
        self._last_s = self._now()
        told = _finite(next((metrics[k] for k in EXAMPLES_KEYS if k in metrics), 1))
        keys = (self._played.weighted_by, *EXAMPLES_KEYS)
        weight = _finite(next((metrics.pop(k) for k in keys if k in metrics), 1))
        if what == EVALUATE:
            self._judged += [(weight, metrics)] if weight > 0 else []
            return
        examples = max(1, int(told)) if told > 0 else 0  # a strategy may weigh by what is no number of them
        self._came += 1
        size_bytes, decision = _array_bytes(message.content), Decision(Verdict.HELD, 0, 1.0)
        self._recorder.decided(self._last_s, client, self._round, decision, size_bytes, examples)

    def finish(self) -> None:
        """The ServerApp has ended: all replies are here."""
        with self._lock:
            self._conclude()

    def _conclude(self) -> None:
        """All replies of what was sent are here: a round of training makes a version."""
        if self._came:
            self._came, self._round = 0, self._round + 1
            self._recorder.published(self._last_s, self._round)
        judged, self._judged = self._judged, []
        if self._is_central:
            self._take_central()
        elif judged:
            self._measured(weighted_mean(judged), self._sent)

    @property
    def _is_central(self) -> bool:
        """Whether it is the ServerApp who judges."""
        return self._flower.central or self._played.is_central

    def _take_central(self) -> None:
        """What the ServerApp itself has found of the newest version since it was asked last."""
        judged = {} if self._outcome is None else self._outcome.judged()
        if new := set(judged) - self._known:
            self._known |= new
            self._measured(dict(judged[max(new)]), self.model())

    def _measured(self, metrics: dict[str, float], model: Tensors) -> None:
        try:
            metrics |= named(metrics, self._flower, "the app", self._recorder.goal)
        except AppError as error:
            if not self._is_unnamed:  # what an app calls its metrics is no reason to end it
                log.warning("metrics are written down as they are: %s", error)
            self._is_unnamed = True
        if not metrics:
            return
        self._recorder.evaluated(self._last_s, self._round, metrics)
        self.best.offer(self._round, metrics, lambda: model)

    def _begin(self, content: RecordDict) -> None:
        """Look at the model that is sent, the first one of several, and at the strategy that sends it."""
        self._out.clear()  # who has not answered so far is not waited for
        self._asked.clear()
        for record in list(content.array_records.values())[:1]:
            with contextlib.suppress(AnabranchError):  # of what is no model for us there is no file
                arrays: dict[str, Any] = arrays_of(record)
                self._recorder.spec, self._sent = ParamSpec.of(arrays), arrays
        self._played, found = played_in(self._thread), outcome_in(self._thread)
        if found is not None and (self._outcome is None or found.of is not self._outcome.of):
            self._outcome, self._known = found, set()
            if self._is_central:
                self._take_central()  # of the model that it starts from

    def model(self) -> Tensors:
        """The newest one, as far as it can be known; else as it was sent last."""
        made = [] if self._outcome is None else self._outcome.model()
        known = [(array.shape, array.dtype) for array in self._sent.values()]
        if [(array.shape, array.dtype) for array in made] != known:
            return self._sent
        return dict(zip(self._sent, made, strict=True))


def _round_of(message: Message) -> str:
    """The round that a message says it is of: as its group in the legacy API, or in its config; or ""."""
    if message.metadata.group_id:
        return str(message.metadata.group_id)
    said = [
        record[key]
        for record in message.content.config_records.values()
        for key in ROUND_KEYS
        if key in record
    ]
    return str(said[0]) if said else ""


def _finite(weight: float) -> float:
    """A weight as it was told, or 1 in place of one that no mean can be made of."""
    return weight if math.isfinite(weight) else 1


def _array_bytes(content: RecordDict) -> int:
    arrays = [array for record in content.array_records.values() for array in record.values()]
    return sum(array.numpy().nbytes if array.stype == NPY else len(array.data) for array in arrays)
