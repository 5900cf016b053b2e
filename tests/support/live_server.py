"""A real server of a model and its settings, on loopback ports in a thread of this process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from wire import Served

from anabranch.core.config.tables import Config
from anabranch.core.model.params import Tensors
from anabranch.core.model.units import UnitGroup
from anabranch.server.app import ServerInfo
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
    with Served(replace(config, server=table), manifest) as served:
        assert served.info is not None
        yield served.info
