"""Whose code a command lets in: what its own settings name, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.trust import admit_found
from anabranch.compress.registry import CODEC_STAGES, others
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.core.parts import is_code
from anabranch.reports.trackers import TRACKERS
from anabranch.simulation.parts import REPLAYED
from anabranch.support.code import let_in_one
from anabranch.workloads.registry import APPS
from anabranch.workloads.splits import SPLITS

LoadCode = Annotated[
    bool,
    typer.Option("--load-code", help="Run the code that the run names, such as its strategy: trust it."),
]

Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="A part of your own that the run's settings name: stage=, split= or transport=...",
        metavar="KIND=PATH.PY:CLASS",
    ),
]
OF_DEVICES = ("stage", "split", "transport")


def admit_parts(texts: Iterable[str]) -> None:
    """Let in what a device's own command line names; a server's settings cannot. Raises `ConfigError`."""
    from anabranch.client.transports import TRANSPORTS

    kinds = dict(zip(OF_DEVICES, (CODEC_STAGES, SPLITS, TRANSPORTS), strict=True))
    for text in texts:
        word, equals, place = text.partition("=")
        if not equals or word not in kinds or not is_code(place):
            known = ", ".join(OF_DEVICES)
            raise ConfigError(f"--part {text!r}: write KIND=path/to/file.py:Class, with a kind of {known}")
        let_in_one(kinds[word], place)
    others()


def admit_trackers(names: Iterable[str]) -> None:
    """Let in the trackers that a command line names, before any work is done. Raises `ConfigError`."""
    for name in names:
        let_in_one(TRACKERS, name)
        TRACKERS.find(name)


def names_code(config: Config) -> bool:
    """Whether the replay of a run of these settings wants a word for the code that they name."""
    app_too = not config.run.keep_payloads and config.run.workload not in APPS.names()
    return app_too or any(is_code(name) for kind in REPLAYED for _, name in kind.named_in(config))


def admit_data(data_dir: Path, database: str, load_code: bool) -> None:
    """Let in what a server's data names, as `admit_found` does."""
    from anabranch.server.verify import stored_config

    admit_found(stored_config(data_dir, database), data_dir, load_code)
