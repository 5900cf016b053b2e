"""A real server on loopback ports, in a thread of this process or in a process of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.model.params import Tensors
from anabranch.core.model.units import UnitGroup
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import write_manifest


@contextmanager
def live_server(
    folder: Path,
    tensors: Tensors,
    config: Config,
    port: int = 0,
    groups: Iterable[UnitGroup] = (),
    buffers: Iterable[str] = (),
    trained: Collection[str] | None = None,
    seed: int | None = None,
) -> Iterator[ServerInfo]:
    """A server of a model's first weights in a thread; it drains at the end. Its data lies in `folder`.

    `seed`: that of the weights, where they were built from one.
    """
    parts = tuple(groups), tuple(buffers), trained
    manifest = write_manifest(folder / "model", "test", tensors, *parts, seed)
    table = replace(
        config.server,
        address=f"127.0.0.1:{port}",
        admin_address="127.0.0.1:0",
        data_dir=str(folder / "data"),
        drain_s=1.0,
    )
    answers: queue.Queue[ServerInfo | Exception] = queue.Queue()
    failures: list[Exception] = []
    loops: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def main() -> None:
        stop = asyncio.Event()
        loops.put((asyncio.get_running_loop(), stop))
        settings = replace(config, server=table)
        await serve(settings, manifest, ready=answers.put, stop=stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            failures.append(error)
            answers.put(error)

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    try:
        info = answers.get(timeout=600)
        if isinstance(info, Exception):
            raise info
        yield info
    finally:
        loop, stop = loops.get(timeout=600)
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(600)
    assert failures == []
