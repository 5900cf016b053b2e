"""Durable updates over the session stream, beside a bare session stream and a bare client stream.

    python -m benchmarks.sessions [SETTING ...]

Each device has a connection and a stream of its own, on which it pushes an update, asks for the next task
with it, and goes on as soon as it has both answers; all of them are two processes. The bare streams take the
same messages and throw them away: the one answers each update, of the other each update is a call. Every
round drives all servers in turn, each time another one first. Processor times are the server's, by thread.

The row of PostgreSQL needs `BENCH_POSTGRESQL`, the URL of a database whose user may make others: each setting
has a new one, beside it, which is dropped after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio
from sqlalchemy import create_engine, make_url

from anabranch.client.exchange import METHOD
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transfer import LinkPace, chunks_of, signed_record, update_header
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec, stages
from anabranch.core.content import BLAKE3, SHA256
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import ParamSpec
from anabranch.identity.addresses import SERVER_NAME
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import new_key, signing_request
from anabranch.identity.signatures import update_message
from anabranch.identity.wallet import Wallet
from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.frames import Chunk, frame_bytes, request_frame, response_frame
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from benchmarks.crew import Crew
from benchmarks.throughput import BUFFERED, RUNS, bare_server, durable_server

PROCESSES, ROUNDS, WARM_UP, LIFE_S = 2, 5, 3, DAY_S
AT_A_TIME = 100  # of a process: gRPC ends calls that too many wait before
POSTGRESQL = "BENCH_POSTGRESQL"
SHAPE = (250, 400)
BARE_STREAM, BARE_CALLS = "bare session stream", "bare client stream"
DURABLE, GUARDED, ON_POSTGRESQL = "durable", "durable, mTLS", "durable, PostgreSQL"
BY_BLAKE3, AT_ONCE = "durable, BLAKE3", "durable, FedAsync"
SERVED = (DURABLE, BY_BLAKE3, AT_ONCE, GUARDED, ON_POSTGRESQL)


@dataclass(frozen=True)
class Setting:
    """So many devices with updates of a model of `SHAPE` in a codec; `updates` a device and round."""

    name: str
    codec: str
    devices: int
    updates: int


FEW, MANY, STREAMS_MAX = 8, 256, 4_000
SETTINGS = (
    Setting("10 KB compressed, 4 devices", "topk(0.02)|int8(256)", 4, 120),
    Setting("10 KB compressed, 8 devices", "topk(0.02)|int8(256)", FEW, 60),
    Setting("10 KB compressed, 256 devices", "topk(0.02)|int8(256)", 256, 4),
    Setting("10 KB compressed, 2000 devices", "topk(0.02)|int8(256)", 2000, 2),
    Setting("0.4 MB raw, 8 devices", "raw", FEW, 40),
    Setting("0.4 MB raw, 256 devices", "raw", 256, 2),
)


@dataclass(frozen=True)
class Measured:
    """One round against one server. Times are milliseconds, `threads` of an update by kind of thread."""

    setting: str
    server: str
    payload_bytes: int
    rate: float
    threads: dict[str, float]
    p50: float
    p99: float

    @property
    def server_ms(self) -> float:
        """Processor time of an update, of all the server's threads."""
        return sum(self.threads.values())


@dataclass(frozen=True)
class Target:
    """Where devices go: `calls`: each update is a call. `papers`: the folder with those of each device."""

    name: str
    address: str
    pid: int
    calls: bool = False
    papers: str = ""

    @property
    def durable(self) -> bool:
        """Whether it knows tasks."""
        return self.name in SERVED


@dataclass
class Device:
    """One of them. `took_s`: from each push to its answer."""

    target: Target
    name: str
    codec: str
    took_s: list[float] = field(default_factory=list)

    async def begin(self) -> None:
        """Make everything that a device has at hand when it pushes, and get a first task."""
        spec = ParamSpec.of({"w": np.zeros(SHAPE, np.float32)})
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4])
        delta = 1e-3 * np.random.default_rng(seed).standard_normal(spec.size, np.float32)
        self._payload = bytes(make_codec(self.codec).encode(delta, Layout.of(spec)))
        self._spec, self._count, self._run_id = spec, 0, ""
        self._task = devices.Task(task_id="t", base_version=0)
        self._wallet, self._channel = self._connected()
        self._stub = DevicesStub(self._channel)
        if not self.target.calls:
            self._stream: Any = self._channel.stream_stream(METHOD)()
        if self.target.durable:
            enrolment = devices.EnrolRequest(
                client_id=self.name,
                protocol_version=PROTOCOL_VERSION,
                capability=devices.Capability(codecs=stages(), examples=1),
            )
            self._run_id = (await self._stub.Enrol(enrolment)).run_id
            await self._stream.write(frame_bytes(devices.RequestHead(ask=self._asking())))
            self._task = response_frame(await self._stream.read()).head.ask.task

    def _connected(self) -> tuple[Wallet | None, Any]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if not self.target.papers:
            return None, aio.insecure_channel(self.target.address, options)
        wallet = _wallet(Path(self.target.papers), self.name)
        credentials = grpc.ssl_channel_credentials(*wallet.credentials())
        named = [*options, ("grpc.ssl_target_name_override", SERVER_NAME)]
        return wallet, aio.secure_channel(self.target.address, credentials, named)

    async def push(self, updates: int) -> None:
        """Push so many."""
        for _ in range(updates):
            began = time.perf_counter()
            if self.target.calls:
                await self._stub.PushUpdate(self._requests())
            else:
                await self._exchange()
            self.took_s.append(time.perf_counter() - began)

    async def _exchange(self) -> None:
        head = devices.RequestHead(push=self._header())
        for offset, data in self._chunks():
            head.offset, head.more = offset, offset + len(data) < len(self._payload)
            await self._stream.write(frame_bytes(head, data))
            head = devices.RequestHead()
        answer = await self._stream.read()
        if self.target.durable:
            said = response_frame(answer).head.push
            if said.decision.reason or not said.next.HasField("task"):
                raise RuntimeError(f"refused: {said}")
            self._task = said.next.task

    async def _requests(self) -> AsyncIterator[devices.PushUpdateRequest]:
        yield devices.PushUpdateRequest(header=self._header())
        for offset, data in self._chunks():
            chunk = devices.UpdateChunk(offset=offset, data=bytes(data))
            yield devices.PushUpdateRequest(chunk=chunk)

    def _chunks(self) -> Iterator[Chunk]:
        """As of a device whose link was quick with the update before."""
        return chunks_of(self._payload, 0, DEFAULT_LIMITS.chunk_bytes_max, pace=LinkPace.QUICK)

    def _header(self) -> devices.UpdateHeader:
        task = self._task
        entry = UpdateEntry(
            f"{self.name}-u{self._count}",
            task.task_id,
            self._spec.layout_hash,
            task.base_version,
            1,
            1,
            self.codec,
            self._payload,
            self._spec.size,
            algorithm=BLAKE3 if self.target.name == BY_BLAKE3 else SHA256,
        )
        signature = b""
        if self._wallet is not None:
            record = signed_record(entry, self.name, self._spec)
            signature = self._wallet.sign(update_message(self._run_id, record))
        return update_header(entry, self.name, signature, self._asking())

    def _asking(self) -> devices.AskTaskRequest:
        self._count += 1
        return devices.AskTaskRequest(
            client_id=self.name,
            task_id=f"{self.name}-t{self._count}",
            manifest_sha256=bytes.fromhex(self._spec.layout_hash),
        )

    async def end(self) -> None:
        """Hang up."""
        await self._channel.close()


def _drive(
    target: Target, names: Sequence[str], setting: Setting, pipe: Connection, barrier: threading.Barrier
) -> None:
    async def drive() -> None:
        fleet = [Device(target, name, setting.codec) for name in names]
        for i in range(0, len(fleet), AT_A_TIME):
            await asyncio.gather(*(device.begin() for device in fleet[i : i + AT_A_TIME]))
        await asyncio.gather(*(device.push(min(WARM_UP, setting.updates)) for device in fleet))
        for device in fleet:
            device.took_s.clear()
        barrier.wait()
        await asyncio.gather(*(device.push(setting.updates) for device in fleet))
        barrier.wait()
        pipe.send([took_s for device in fleet for took_s in device.took_s])
        await asyncio.gather(*(device.end() for device in fleet))

    asyncio.run(drive())


def _round(target: Target, setting: Setting, number: int) -> Measured:
    each = setting.devices // PROCESSES
    names = [[f"{number}-{process}-{n}" for n in range(each)] for process in range(PROCESSES)]
    pipes = [multiprocessing.Pipe(duplex=False) for _ in names]
    crew = Crew(
        _drive, [(target, mine, setting, there) for mine, (_, there) in zip(names, pipes, strict=True)]
    )
    for _, there in pipes:
        there.close()  # else nobody would notice that its process is gone
    crew.meet()
    before, began = used_s(target.pid), time.perf_counter()
    crew.meet()
    elapsed_s, after = time.perf_counter() - began, used_s(target.pid)
    took_s = [s for here, _ in pipes for s in here.recv()]
    crew.end()
    updates = len(took_s)
    threads = {kind: 1000 * (s - before.get(kind, 0.0)) / updates for kind, s in after.items()}
    p50, p99 = (1000 * float(np.percentile(took_s, q)) for q in (50, 99))
    size = _payload_bytes(setting)
    return Measured(setting.name, target.name, size, updates / elapsed_s, threads, p50, p99)


def _payload_bytes(setting: Setting) -> int:
    spec = ParamSpec.of({"w": np.zeros(SHAPE, np.float32)})
    delta = np.random.default_rng(0).standard_normal(spec.size, np.float32)
    return len(make_codec(setting.codec).encode(delta, Layout.of(spec)))


def used_s(pid: int) -> dict[str, float]:
    """Processor time of a process by kind of thread, of those that are there (Linux)."""
    used: dict[str, float] = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (thread / "comm").read_text().strip()
            spent_s = int((thread / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        kind = "event loop" if int(thread.name) == pid else "Python" if name.startswith("python") else "gRPC"
        used[kind] = used.get(kind, 0.0) + spent_s
    return used


# --- the servers ---------------------------------------------------------------------------------


async def _exchange(_: object, context: Any) -> None:
    answer = frame_bytes(devices.ResponseHead(push=devices.PushUpdateResponse(receive_seq=1)))
    while (frame := await context.read()) is not aio.EOF:
        if not frame.head.more:
            await context.write(answer)


def _add_exchange(server: aio.Server) -> None:
    handler: Any = grpc.stream_stream_rpc_method_handler(_exchange, request_frame, None)
    service, method = METHOD.strip("/").split("/")
    server.add_registered_method_handlers(service, {method: handler})


def _wallet(papers: Path, name: str) -> Wallet:
    """The papers of a device, as an authority gives them out that nobody asks over a network."""
    with Authority.open(papers) as authority:
        key = new_key()
        token = authority.invite(name, LIFE_S)
        _, certificate = authority.admit(token, signing_request(key), LIFE_S)
        return Wallet(papers, key, certificate, authority.certificate)


@contextmanager
def empty_database(url: str) -> Iterator[str]:
    """A new database beside that of a URL of PostgreSQL; yields its URL, and drops it in the end."""
    beside = make_url(url).set(drivername="postgresql+psycopg")
    name = f"bench_{uuid.uuid4().hex}"
    admin = create_engine(beside, isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
            try:
                yield beside.set(database=name).render_as_string(hide_password=False)
            finally:
                connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        admin.dispose()


def _targets(setting: Setting, folder: Path, stack: ExitStack) -> list[Target]:
    """The servers of a setting, all of them up."""
    address, pid = stack.enter_context(bare_server(_add_exchange))
    targets = [Target(BARE_STREAM, address, pid), Target(BARE_CALLS, address, pid, calls=True)]
    papers = folder / "ca"
    more = {DURABLE: (), BY_BLAKE3: (f"run.payload_digest={BLAKE3}",), AT_ONCE: ()}
    if setting.devices <= MANY:  # the papers of more take longer than the streams of the first stay open
        Authority.create(papers).close()
        more |= {GUARDED: (f"identity.folder={papers}", "identity.tls=always")}
    if POSTGRESQL in os.environ and setting.devices <= FEW:
        database = stack.enter_context(empty_database(os.environ[POSTGRESQL]))
        more[ON_POSTGRESQL] = (f"server.database={database}",)
    for name in more:
        (own := folder / name.replace(", ", "-")).mkdir()
        codec = f"uplink.codec={setting.codec}"
        streams = f"limits.rpcs_max={2 * STREAMS_MAX}"  # of which calls have the other half
        rule = "strategy.name=fedasync" if name == AT_ONCE else BUFFERED
        served, process = stack.enter_context(
            durable_server(own, SHAPE, codec, streams, *more[name], rule=rule)
        )
        targets.append(Target(name, served, process.pid, papers=str(papers) if name == GUARDED else ""))
    return targets


def measure(setting: Setting) -> list[Measured]:
    """All rounds against all servers."""
    RUNS.mkdir(exist_ok=True)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=RUNS) as folder, ExitStack() as stack:
        targets = _targets(setting, Path(folder), stack)
        for number in range(ROUNDS):
            first = number % len(targets)
            for target in targets[first:] + targets[:first]:
                found.append(row := _round(target, setting, number))
                threads = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row.threads.items())
                print(f"{row.setting}, {row.server}: {row.rate:.0f}/s, {row.server_ms:.2f} ms ({threads})")
    return found


def table(rows: Sequence[Measured]) -> str:
    """Medians, and medians of the ratios of each round."""
    head = ["update", "server", "1/s", "of the bare session stream", "of the bare client stream"]
    head += ["server, ms an update", "event loop", "other Python", "gRPC", "median", "99 %"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in dict.fromkeys(row.setting for row in rows):
        of = {name: [r for r in rows if (r.setting, r.server) == (setting, name)] for name in _names(rows)}
        for name in (name for name in of if of[name]):
            ratios = [
                statistics.median(r.rate / b.rate for r, b in zip(of[name], of[bare], strict=True))
                for bare in (BARE_STREAM, BARE_CALLS)
            ]
            ms = [statistics.median(r.server_ms for r in of[name])]
            ms += [
                statistics.median(r.threads.get(kind, 0.0) for r in of[name])
                for kind in ("event loop", "Python", "gRPC")
            ]
            waits = [statistics.median(getattr(r, q) for r in of[name]) for q in ("p50", "p99")]
            cells = [setting, name, f"{statistics.median(r.rate for r in of[name]):.0f}"]
            cells += [f"{ratio:.2f}" for ratio in ratios] + [f"{value:.2f}" for value in ms]
            cells += [f"{wait:.0f} ms" for wait in waits]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _names(rows: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(row.server for row in rows))


def section() -> str:
    """The page's."""
    return f"""## Durable updates over the session stream

Devices that push an update with the ask for their next task, over a stream each
([the protocol](protocol.md#the-exchange)), as fast as they are answered; two processes of them share the
cores with the server. The bare session stream answers the same messages at once and keeps nothing; the bare
client stream takes each update as a call. FedAsync makes a version of each update, FedBuff, which the other
rows are of, one of ten. {ROUNDS} rounds, in each of which every server has its turn; medians, and medians
of the ratios of each round. Processor times are the server's, of an update.

{table([row for setting in SETTINGS for row in measure(setting)])}"""


def main(arguments: Sequence[str]) -> None:
    """Measure the settings named, or all of them, and print."""
    chosen = [setting for setting in SETTINGS if not arguments or setting.name in arguments]
    rows = [row for setting in chosen for row in measure(setting)]
    print(table(rows))
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main(sys.argv[1:])
