"""The app's own ServerApp under `flwr run`, written down: what Flower makes of an app, to compare with.

Nothing is changed but the Grid that the ServerApp is given: it passes everything on, and counts. So
`result.json` and the report are those of any run. A version is a round whose replies have come; times are
real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anabranch.core.config.goal import Goal
from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec, Tensors, digest
from anabranch.core.model.updates import Decision, Verdict
from anabranch.flower.installed import flwr_version

flwr_version()

from flwr.app import Context, Message, RecordDict  # noqa: E402 - the environment is set by then
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402

from anabranch.flower.app import mean_metrics, named  # noqa: E402
from anabranch.flower.messages import EVALUATE, TRAIN, Reply, ServerAppMessage  # noqa: E402
from anabranch.flower.project import load  # noqa: E402
from anabranch.flower.records import arrays_of  # noqa: E402
from anabranch.flower.server_app import PREFIX, unflattened  # noqa: E402
from anabranch.reports.folders import claimed  # noqa: E402
from anabranch.reports.html import write_report  # noqa: E402
from anabranch.reports.models import BEST, FINAL, Best, write_model  # noqa: E402
from anabranch.reports.origin import reason  # noqa: E402
from anabranch.reports.recorder import EVENTS_FILE, Recorder  # noqa: E402
from anabranch.reports.result import FLOWER, Status  # noqa: E402

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
    flower = tables.get("flower", {})
    chosen = {what: str(flower.get(what, "")) for what in ("accuracy", "loss")}
    with recorder:
        counting = CountingGrid(grid, recorder, chosen)
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
    """Write the result, its page and the models that were sent."""
    result = recorder.result(counting.model_sha256, "", time.perf_counter() - began, status, why)
    if counting.model:
        write_model(folder / FINAL, counting.model, result.versions)
    if counting.best.model is not None and counting.best.version is not None:
        write_model(folder / BEST, counting.best.model, counting.best.version, counting.best.metrics)
    result.write(folder)
    write_report(result, folder)


class CountingGrid(Grid):
    """A Grid that tells a recorder what passes through it. `chosen` names the accuracy and the loss."""

    def __init__(self, grid: Grid, recorder: Recorder, chosen: dict[str, str]) -> None:
        self._grid, self._recorder, self._chosen = grid, recorder, chosen
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # the legacy API sends each message from a thread of its own
        self._phase = ("", "")  # what is sent at the moment: its type and its round
        self._round, self._came, self._last_s = 0, 0, 0.0
        self._judged: list[Reply] = []
        self.model_sha256 = ""
        self.model: Tensors = {}  # as it was sent last
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
        return list(self._grid.push_messages(sent))

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
            for message in sent:
                what, client = message.metadata.message_type, f"node-{message.metadata.dst_node_id}"
                if what not in (TRAIN, EVALUATE):
                    continue
                if (phase := (what, message.metadata.group_id)) != self._phase:
                    self.finish()
                    self._phase = phase
                    self._note_model(message.content)
                if what == TRAIN:
                    self._recorder.granted(self._now(), client, message.metadata.message_id, self._round)
                    self._recorder.downloaded(self._now(), client, _array_bytes(message.content))

    def _heard(self, replies: Iterable[Message]) -> None:
        with self._lock:
            for message in replies:
                self._take(message)

    def _take(self, message: Message) -> None:
        what, client = message.metadata.message_type, f"node-{message.metadata.src_node_id}"
        if what not in (TRAIN, EVALUATE):
            return
        try:
            reply = Reply.of(message, what)
        except AppError as error:
            self._recorder.note(self._now(), "failed", client=client, why=str(error))
            return
        self._last_s = self._now()
        if what == EVALUATE:
            self._judged.append(reply)
            return
        self._came += 1
        size_bytes, decision = _array_bytes(message.content), Decision(Verdict.HELD, 0, 1.0)
        self._recorder.decided(self._last_s, client, self._round, decision, size_bytes, reply.examples)

    def finish(self) -> None:
        """All replies of what was sent are here: a round of training makes a version."""
        if self._came:
            self._came, self._round = 0, self._round + 1
            self._recorder.published(self._last_s, self._round)
        if self._judged:
            metrics, self._judged = mean_metrics(self._judged), []
            metrics |= named(metrics, self._chosen, "the app", self._recorder.goal)
            self._recorder.evaluated(self._last_s, self._round, metrics)
            self.best.offer(self._round, metrics, lambda: self.model)

    def _note_model(self, content: RecordDict) -> None:
        arrays: dict[str, Any] = arrays_of(content.array_records[ServerAppMessage.of(content).arrays])
        self._recorder.spec = spec = ParamSpec.of(arrays)
        self.model, self.model_sha256 = arrays, digest(spec.flatten(arrays))


def _array_bytes(content: RecordDict) -> int:
    return sum(array.numpy().nbytes for record in content.array_records.values() for array in record.values())
