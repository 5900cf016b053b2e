"""`anabranch admin attest-restore`: what an operator says after a server's data came back from a backup."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.members import FOLDER, Folder
from anabranch.cli.options import AsJson
from anabranch.cli.output import Output
from anabranch.core.config.tables import ServerTable
from anabranch.identity.authority import Authority


def attest_restore(
    data_dir: Annotated[Path, typer.Option(help="The server's data directory.", metavar="DIR")] = Path(
        ServerTable.data_dir
    ),
    database: Annotated[str, typer.Option(help="The database URL, where it is not SQLite.")] = "",
    folder: Folder = FOLDER,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="For a federation without an authority: nothing is signed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say, by the authority's key, that a run goes on from a backup; then start its server again.

    Devices that have seen later versions believe it: they discard what they have of those, and go on.
    """
    from anabranch.server.restored import FILE, attest

    with ExitStack() as stack:
        authority = None if insecure else stack.enter_context(Authority.open(folder))
        made = attest(data_dir, database, authority)
    path = data_dir / FILE
    Output(as_json).result(
        {"file": str(path), "run_id": made.run_id, "version": made.version, "head": made.head},
        f"{path}: run {made.run_id} goes on from version {made.version}; start the server again",
    )
