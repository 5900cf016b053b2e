"""The operators' side of a running server."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from anabranch.client.channel import (
    CONTROL_S,
    StallGuard,
    check_plain,
    mapped_errors,
    open_channel,
    request_of,
)
from anabranch.client.clocks import check_unreached
from anabranch.client.listed import ListedJob, read_jobs
from anabranch.client.watching import WatchedEvent, WatchPlace
from anabranch.core.config.toml import setting_text
from anabranch.core.errors import ConfigError, InvalidUpdate, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import ParamSpec
from anabranch.identity.wallet import Wallet, read_wallet
from anabranch.protos import convert
from anabranch.protos.v1 import jobs_pb2 as jobs_pb
from anabranch.protos.v1 import model_pb2 as model_pb
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.jobs_pb2_grpc import JobsStub
from anabranch.protos.v1.operators_pb2_grpc import OperatorsStub

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

TellBytes = Callable[[int, int], object]  # how many are here, of how many

ROLLBACK_S = 3600.0
AGAIN_S = 1.0  # between the connections of a watch, should each of them break as soon as it is there
MAY_YET = "the order may be carried out yet: look before it is given again"
UNKNOWN = "this run knows no client of that name: is it spelt so?"

OF_THE_RUN = (
    *("version", "updates_applied", "updates_rejected", "updates_left_out", "rollbacks", "tasks_granted"),
    *("leases_lost", "clients"),
)
OF_THE_SERVER = (
    *("uplink_bytes", "uplink_bytes_raw", "downlink_bytes", "downlink_bytes_full_equivalent"),
    *("observer_bytes", "updates_duplicate", "uptime_s"),
)


@dataclass(frozen=True)
class RunStatus:
    """How a run stands. `finished` says why it has ended, and is empty while it goes on.

    `given_up`: it has ended for want of updates that could be used. An older server never says so.
    """

    run: str
    run_id: str
    strategy: str
    version: int
    updates_applied: int
    updates_rejected: int
    updates_duplicate: int
    clients: int
    live_tasks: int
    leases_lost: int
    paused: bool
    finished: str
    uplink_bytes: int
    downlink_bytes: int
    uplink_bytes_raw: int
    downlink_bytes_full_equivalent: int
    observer_bytes: int
    uptime_s: float
    config: Mapping[str, Any]
    quarantined: Mapping[str, str]
    clients_online: int
    tasks_granted: int
    created_at_s: float
    best_version: int | None
    best_accuracy: float | None
    settings_changed: tuple[SettingAnswer, ...] = ()
    best_metric: str = ""  # by which the best version is that, and what it came to
    best_value: float | None = None
    run_twice: Sequence[str] = ()  # clients that were lately seen to be run by two processes at a time
    masked_sums: MaskedSums | None = None
    phase: str = ""  # of a strategy of phases, in words
    frozen_sha256: str = ""  # hex, of the frozen tensors that travel apart; empty where none do
    disk_full: str = ""  # what was refused last for want of room on the disk, and how long ago; or nothing
    rollbacks: int = 0
    updates_left_out: int = 0  # of those applied, by rollbacks
    given_up: bool = False
    now_s: float = 0.0  # the time of the run's events when it answered, or 0: an older server does not say

    @property
    def sums_lost(self) -> int:
        """Masked sums of which no version was made."""
        return 0 if self.masked_sums is None else self.masked_sums.lost

    def to_json(self) -> dict[str, Any]:
        """Plain values; what counts since the run began and what since the server started also by that."""
        found = asdict(self)
        sets = {"since_the_run_began": OF_THE_RUN, "since_the_server_started": OF_THE_SERVER}
        return found | {name: {key: found[key] for key in keys} for name, keys in sets.items()}


@dataclass(frozen=True)
class WaitingSum:
    """A masked sum that waits. `version`: the newest when it was closed; `answered`: by these keepers."""

    number: int
    version: int
    updates: int
    answered: tuple[str, ...]


@dataclass(frozen=True)
class KeeperStanding:
    """A keeper. `name` is empty until it has been reached; `trouble`: why it has not answered.

    `answered`: sums, since the server started.
    """

    address: str
    name: str
    trouble: str
    answered: int


@dataclass(frozen=True)
class MaskedSums:
    """How masked sums stand. `gathered`: updates that wait for others; `waiting`: sums, oldest first.

    `lost`: sums of which no version was made.
    """

    gathered: int
    waiting: tuple[WaitingSum, ...]
    keepers: tuple[KeeperStanding, ...]
    lost: int


@dataclass(frozen=True)
class PublishedVersion:
    """A version; `sha256` (hex) is None where the server has none, `snapshot`: it is kept on disk."""

    version: int
    sha256: str | None
    updates: int
    published_at_s: float
    snapshot: bool
    metrics: Mapping[str, float]
    held: bool  # `export` has it

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class ClientStanding:
    """A client, with what is known against it since it was last released.

    `flaws`: updates that no honest device sends; `shortened`: those that the clip has cut. `quarantined` says
    why it is in quarantine, and is empty if it is not.
    """

    client_id: str
    updates_taken: int
    updates_rejected: int
    flaws: int
    shortened: int
    quarantined: str
    # Since the server started: when it called last, whether it still does, how old what it was given is.
    last_seen_s: float | None
    online: bool
    versions_behind: int | None
    tags: tuple[str, ...] = ()
    # As it says itself: the share of the model's units that it can train, its machine's memory (0: unknown).
    width_max: float = 1.0
    memory_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class SettingAnswer:
    """A setting (`table.key`) of the run that has another value since `at_s`; `by` whom, in words."""

    path: str
    value: Any
    was: Any
    by: str
    at_s: float

    @property
    def text(self) -> str:
        """The setting, and what it was."""
        return f"{self.path} = {setting_text(self.value)} (was {setting_text(self.was)})"


@dataclass(frozen=True)
class SettingsAnswer:
    """What was changed; `finished` says why the run has ended, `reopened` that it had and goes on.

    `warnings`: what whoever has set them should know; nothing of a server of before.
    """

    changes: tuple[SettingAnswer, ...]
    finished: str
    reopened: bool
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What has become of it, for people; without the warnings."""
        found = [change.text for change in self.changes]
        if self.reopened:
            found.append("the run had ended, and goes on: start its devices again")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Percentiles:
    """Of the newest 1,000 values; `count`: of all since the server started."""

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServerMetrics:
    """How a server does, since its start: see `GetMetricsResponse` in protos/v1/operators.proto."""

    queue: int
    queue_max: int
    queue_wait_s: Percentiles
    commit_s: Percentiles
    append_s: Percentiles
    fsync_s: Percentiles
    fold_s: Percentiles
    batch_events: Percentiles
    push_bytes: Percentiles
    staleness: Percentiles
    calls_shed: int
    asks_refused: int
    memory_bytes: int
    disk_free_bytes: int
    leader: str
    log_seq: int
    clients_training: int
    uploads_open: int
    uptime_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class OperatorClient:
    """The operators' service at `address`. Raises errors of the tree; `Unavailable` if nobody is there.

    `ClocksDisagree` where the server's certificate does not count by this machine's clock.
    `wallet`: the operator's papers, where the port is guarded.
    """

    def __init__(self, address: str, wallet: Wallet | None = None) -> None:
        self.address = address
        self._wallet = wallet
        self._channel = open_channel(address, wallet=wallet)
        self._stub = OperatorsStub(self._channel)
        self._manifest: model_pb.Manifest | None = None  # as the last status had it

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut off whatever is under way."""
        self._channel.close()

    def status(self) -> RunStatus:
        """How the run stands."""
        s = self._call(self._stub.GetStatus, operators.GetStatusRequest())
        self._manifest = s.manifest
        more: dict[str, Any] = {
            "config": json.loads(s.config_json or "{}"),
            "quarantined": dict(s.quarantined),
            "best_version": s.best_version if s.HasField("best_version") else None,
            "best_accuracy": s.best_accuracy if s.HasField("best_version") else None,
            "best_value": s.best_value if s.best_metric else None,
            "settings_changed": _changes(s.settings_changed),
            "run_twice": list(s.run_twice),
            "masked_sums": _masked_sums(s.masked_sums) if s.HasField("masked_sums") else None,
            "frozen_sha256": s.manifest.frozen_sha256.hex(),
        }
        return RunStatus(**_told(s, RunStatus, more))

    def model(self) -> ParamSpec:
        """The tensors of the run's model. Raises `ManifestMismatch` where they cannot be read."""
        if self._manifest is None:
            self.status()
        assert self._manifest is not None, "a status has it"
        return convert.manifest_from_proto(self._manifest)

    def jobs(self) -> list[ListedJob]:
        """The runs of a server, in the order in which they were added; the only one has no name."""
        return read_jobs(self._call(JobsStub(self._channel).ListJobs, jobs_pb.ListJobsRequest()))

    def metrics(self) -> ServerMetrics:
        """How the server itself does. Raises `ProtocolError` for an older one, which cannot say."""
        found = self._call(self._stub.GetMetrics, operators.GetMetricsRequest())
        values = _told(found, ServerMetrics, {})
        spread = {name: _percentiles(v) for name, v in values.items() if isinstance(v, operators.Percentiles)}
        return ServerMetrics(**(values | spread))

    def versions(self, after: int = 0, limit: int = 1000, held: bool = False) -> list[PublishedVersion]:
        """Published versions above `after`, in order; `held`: only those that `export` has.

        An older server gives all of them, whatever is wanted.
        """
        request = request_of(operators.ListVersionsRequest, after=after, limit=limit, held=held)
        return [
            PublishedVersion(
                **_told(v, PublishedVersion, {"sha256": v.sha256.hex() or None, "metrics": dict(v.metrics)})
            )
            for v in self._call(self._stub.ListVersions, request).versions
        ]

    def pages_of_versions(
        self, after: int = 0, limit: int = 0, held: bool = False
    ) -> Iterator[list[PublishedVersion]]:
        """Published versions above `after`, in order, at most `limit` (0: 1000) at a time; `held`: see above.

        Up to the newest of now at least, and no further page: where versions come as quickly as pages do,
        the last of them would never be reached.
        """
        newest = self.status().version
        while after < newest and (page := self.versions(after, limit, held)):
            yield page
            after = page[-1].version

    def pause(self) -> None:
        """Hand out no more tasks; updates are still taken."""
        self._order(self._stub.Pause, operators.PauseRequest())

    def resume(self) -> None:
        """Hand out tasks again."""
        self._order(self._stub.Resume, operators.ResumeRequest())

    def quarantine(self, client_id: str, why: str = "", tag: str = "") -> list[str]:
        """No task for a client, or all of a tag, and no update of it, until `release`; `why` is told to it.

        Returns who was meant. Those that the run does not know are barred as well, and a warning says so.
        """
        request = operators.QuarantineRequest(client_id=client_id, why=why, tag=tag)
        answer = self._order(self._stub.Quarantine, request)
        for name in answer.unknown:
            log.warning("%s is barred, but %s", name, UNKNOWN)
        return list(answer.client_ids)

    def release(self, client_id: str, tag: str = "") -> bool:
        """Let a client, or all of a tag, out of quarantine; whether anybody was in."""
        request = operators.ReleaseRequest(client_id=client_id, tag=tag)
        return self._order(self._stub.Release, request).released

    def drop_sum(self, number: int, why: str = "") -> int:
        """Wait no more for the keepers of a masked sum; returns how many updates are lost with it.

        Raises `ConfigError` where no sum of this number waits.
        """
        request = request_of(operators.DropSumRequest, number=number, why=why)
        return self._order(self._stub.DropSum, request).updates_lost

    def drop_sums_of(self, client_id: str, why: str = "") -> tuple[list[int], int]:
        """Quarantine a client and wait no more for any masked sum that has an update of it.

        Returns the sums' numbers, and how many updates are lost with them. Raises `ConfigError` where the run
        knows no such client.
        """
        request = operators.DropSumRequest(client_id=client_id, why=why)
        answer = self._order(self._stub.DropSum, request)
        return list(answer.numbers), answer.updates_lost

    def tag(
        self, client_ids: Sequence[str], add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> dict[str, list[str]]:
        """Give clients notes, and take others away; returns what they have now. Raises `ConfigError`.

        Clients that the run does not know may have some as well, and a warning says so.
        """
        request = operators.TagClientsRequest(client_ids=client_ids, add=add, remove=remove)
        answer = self._order(self._stub.TagClients, request)
        for name in answer.unknown:
            log.warning("%s: %s", name, UNKNOWN)
        return {client_id: tags.split() for client_id, tags in sorted(answer.tags.items())}

    def clients(self, limit: int = 0, tag: str = "") -> list[ClientStanding]:
        """The clients, or those with a tag, the most suspicious first; at most `limit` (0: 1000)."""
        request = request_of(operators.ListClientsRequest, limit=limit, tag=tag)
        return [_standing(c) for c in self._call(self._stub.ListClients, request).clients]

    def pages_of_clients(self, limit: int = 0) -> Iterator[list[ClientStanding]]:
        """All clients in the order of their names, at most `limit` (0: 5000) at a time.

        An older server, which knows of no pages, gives its first thousand alone.
        """
        after = ""
        while True:
            request = request_of(operators.ListClientsRequest, limit=limit, after=after)
            page = [_standing(c) for c in self._call(self._stub.ListClients, request).clients]
            if page:
                yield page
            if not page or page[-1].client_id <= after:
                return
            after = page[-1].client_id

    def rollback(self, to_version: int, without: Sequence[str], everyone: bool = False) -> tuple[int, int]:
        """The version that comes of leaving out the updates of some clients, or all, after `to_version`.

        And how many updates that were. The clients `without` go into quarantine. It takes as long as the
        run's whole log takes to fold.

        Raises `UnknownVersion`; `ConfigError` for a client that is not enrolled, or a strategy of rounds.
        """
        request = request_of(
            operators.RollbackRequest, to_version=to_version, without=without, everyone=everyone
        )
        done = self._order(self._stub.Rollback, request, ROLLBACK_S)
        return done.version, done.updates_left_out

    def set_settings(self, values: Mapping[str, Any]) -> SettingsAnswer:
        """Change settings of the run, `table.key` -> value. Raises `ConfigError`: then none is changed."""
        request = operators.SetSettingsRequest(values_json=json.dumps(dict(values)))
        done = self._order(self._stub.SetSettings, request)
        return SettingsAnswer(_changes(done.changes), done.finished, done.reopened, tuple(done.warnings))

    def report_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a version."""
        request = request_of(operators.ReportMetricsRequest, version=version, metrics=metrics)
        self._call(self._stub.ReportMetrics, request)

    def export(
        self,
        path: Path,
        version: int | None = None,
        best: bool = False,
        stage: int = 0,
        tell: TellBytes = lambda _written, _size: None,
    ) -> int:
        """Write a version (the newest if None, or the `best`) as a safetensors file; returns which one.

        `stage`: only the tensors that this stage of a model that grows needs. `tell` hears how far it is. The
        file appears only when it is whole. Raises `UnknownVersion`, and `ConfigError` where there is no such
        stage.
        """
        unfinished = path.with_name(path.name + ".tmp")
        exported = written = size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file, self._errors():
                request = request_of(operators.ExportRequest, version=version, best=best, stage=stage)
                stream = self._stub.Export(request)
                with StallGuard(stream.cancel, DEFAULT_LIMITS.upload_idle_s) as guard:
                    for message in stream:
                        guard.moved()
                        size = convert.check_payload_size(message.size_bytes)
                        if message.offset != written:
                            raise InvalidUpdate(f"a chunk at {message.offset}: expected {written}")
                        exported, written = message.version, written + file.write(message.data)
                        tell(written, size)
            if written != size or not size:
                raise Unavailable(f"the export ended after {written} of {size} bytes")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return exported

    def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
        """What happens, as it happens, after the cursor (None: from now on); ends as the server stops.

        It goes on over another connection where one breaks, as the server has them do once they are old.
        Raises `Unavailable` where the server is gone.
        """
        place, over = WatchPlace(after_seq), False
        while not over:
            began = time.monotonic()
            try:
                yield from place.fresh(self._watch)
                over = True
            except Unavailable:
                self.status()  # which it answers, unless more is gone than the connection
                time.sleep(max(0.0, began + AGAIN_S - time.monotonic()))

    def _watch(self, after_seq: int | None) -> Iterator[WatchedEvent]:
        with self._errors():
            request = request_of(
                operators.WatchRequest, after_seq=after_seq or 0, all_kept=after_seq is not None
            )
            stream = self._stub.Watch(request)
            try:
                for e in stream:
                    data = json.loads(e.data_json or "{}")
                    yield WatchedEvent(e.seq, e.at_s, e.kind, e.client_id, e.version, data)
            finally:
                stream.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with mapped_errors(self.address, plain=self._wallet is None):
                yield
        except Unavailable as error:
            check_unreached(error, self.address, self._wallet, time.time())
            raise

    def _order(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_s: float = CONTROL_S,
    ) -> Response:
        """A call that changes something: it may be at work in the server when nobody waits for it."""
        try:
            return self._call(method, request, timeout_s)
        except Unavailable as error:
            if not error.unanswered:
                raise
            raise Unavailable(f"{error}; {MAY_YET}") from error
        except KeyboardInterrupt as stop:
            stop.add_note(MAY_YET)
            raise

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_s: float = CONTROL_S,
    ) -> Response:
        with self._errors():
            return method(request, timeout=timeout_s)


def _percentiles(found: operators.Percentiles) -> Percentiles:
    return Percentiles(found.count, found.p50, found.p90, found.p99)


def _masked_sums(said: operators.MaskedSums) -> MaskedSums:
    return MaskedSums(
        said.gathered,
        tuple(WaitingSum(w.number, w.version, w.updates, tuple(w.answered)) for w in said.waiting),
        tuple(KeeperStanding(k.address, k.name, k.trouble, k.answered) for k in said.keepers),
        said.lost,
    )


def _changes(found: Iterable[operators.SettingChange]) -> tuple[SettingAnswer, ...]:
    return tuple(
        SettingAnswer(c.path, json.loads(c.value_json), json.loads(c.was_json), c.by, c.at_s) for c in found
    )


def operator_wallet(folder: Path | None) -> Wallet | None:
    """The papers that `anabranch admin operator` wrote; None for no folder. Raises `ConfigError`."""
    if folder is None:
        return None
    if (wallet := read_wallet(folder)) is None:
        raise ConfigError(f"{folder} has no identity: `anabranch admin operator NAME --out DIR` makes one")
    wallet.check(time.time())
    return wallet


def open_operator(address: str, wallet: Wallet | None, insecure: bool = False) -> OperatorClient:
    """The operators' service, in the clear only on this machine or with `insecure`. Raises `ConfigError`."""
    if wallet is None:
        check_plain(address, insecure)
    return OperatorClient(address, wallet=wallet)


def _told(message: Message, kind: type[Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass: `more`, and those that a message has by the same names."""
    names = {f.name for f in fields(kind)} & {*message.DESCRIPTOR.fields_by_name}
    return {**{name: getattr(message, name) for name in names - {*more}}, **more}


def _standing(told: operators.Client) -> ClientStanding:
    more = {
        "last_seen_s": told.last_seen_s or None,
        "versions_behind": told.versions_behind if told.HasField("versions_behind") else None,
        "tags": tuple(told.tags),
        "width_max": told.width_max if told.HasField("width_max") else 1.0,
    }
    return ClientStanding(**_told(told, ClientStanding, more))
