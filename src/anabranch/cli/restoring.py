"""A server's data copied and put back: `anabranch admin backup`, `restore` and `attest-restore`.

They run on the server's machine: the data are files, and hold the updates of devices, which no operator's
certificate gives away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.trust import admit_found
from anabranch.cli.members import FOLDER, Folder
from anabranch.cli.next_steps import command_line, with_commands
from anabranch.cli.options import AsJson
from anabranch.cli.output import Output, Ticker
from anabranch.cli.overall import along_log
from anabranch.cli.parts import LoadCode, admit_data, names_code
from anabranch.core.config.tables import Config, ServerTable
from anabranch.core.errors import ConfigError
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import time_text
from anabranch.reports.text import bytes_text
from anabranch.support.stop_signals import leaving_in_order

DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="ANABRANCH_SERVER_DATA_DIR",
        help="The server's data directory.",
        metavar="DIR",
    ),
]
Unsigned = Annotated[
    bool, typer.Option("--insecure", help="For a federation without an authority: nothing is signed.")
]
Unproved = Annotated[
    bool, typer.Option("--unproved", help="Without a replay: `anabranch verify` can do it later.")
]
DATA_DIR = Path(ServerTable.data_dir)


def backup(
    to: Annotated[Path, typer.Argument(help="A folder that is not there yet.", metavar="TO")],
    data_dir: DataDir = DATA_DIR,
    unproved: Unproved = False,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Copy a server's data while it serves, and prove the copy, as `anabranch verify` does.

    All that was acknowledged before it began is in it. The authority's folder is no part of the data.
    """
    from anabranch.server.backup import back_up, check_source

    output = Output(as_json)
    check_source(data_dir)
    if not unproved:
        admit_data(data_dir, "", load_code)
    with leaving_in_order(), Ticker(output) as ticker:
        made = back_up(data_dir, to, not unproved, shown_by(ticker))
    what = f"version {made.version}, {made.events} events, {bytes_text(made.size_bytes)}"
    sound = "" if unproved else ", sound"
    output.result({"folder": str(to), **asdict(made)}, f"{to}: {what}{sound}; {_use(to, load_code)}")


def _use(backup: Path, load_code: bool) -> str:
    """What it is good for: not every run can be put back, and nobody should hear of that in the night.

    The command works as it stands, with a folder in the place of DIR: it wants the word for the code that the
    copy was proved by, and there is nobody to sign for data which no authority has seen.
    """
    from anabranch.server.proofs import AUTHORITIES
    from anabranch.server.restored import refuse_private
    from anabranch.server.verify import stored_config

    config = stored_config(backup)
    try:
        refuse_private(config)
    except ConfigError as error:
        return f"it helps `anabranch admin rebuild --from` and `report`, and cannot be put back: {error}"
    code = ["--load-code"] if load_code or names_code(config) else []
    unsigned = [] if (backup / AUTHORITIES).exists() else ["--insecure"]
    command = command_line("admin", "restore", backup, "--data-dir", "DIR", *code, *unsigned)
    return with_commands("put it back with:", [command])


def restore(
    source: Annotated[Path, typer.Argument(help="What `admin backup` has made.", metavar="FROM")],
    data_dir: DataDir = DATA_DIR,
    folder: Folder = FOLDER,
    insecure: Unsigned = False,
    unproved: Unproved = False,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Make a data directory of a backup, and say by the authority's key that the run goes on from there.

    Nothing is overwritten. Devices that have seen later versions discard what they have of those, and go on.
    """
    from anabranch.server.backup import put_back, read_backup

    output = Output(as_json)
    found = read_backup(source)
    if not unproved:
        admit_data(source, "", load_code)
    with ExitStack() as stack:
        authority = None if insecure else stack.enter_context(_authority(folder))
        ticker = stack.enter_context(Ticker(output))
        _, word = put_back(source, data_dir, authority, not unproved, shown_by(ticker))
    output.result(
        {"data_dir": str(data_dir), **asdict(found), "head": word.head},
        f"{data_dir}: run {found.run_id} as of {time_text(found.taken_at)}, version {found.version}; "
        "start its server again, with the same settings and this --data-dir",
    )


def _authority(folder: Path) -> Authority:
    """Whose word it is. Raises `ConfigError`: to make another one would mend nothing."""
    if not folder.exists():
        raise ConfigError(
            f"{folder} is not there: name the folder of the federation's authority by --folder, or say "
            "--insecure where it has none, and nothing is to be signed"
        )
    return Authority.open(folder)


def shown_by(ticker: Ticker) -> Callable[[str, int, int], None]:
    """How far a copy is, as a line."""

    def show(doing: str, done: int, total: int) -> None:
        share = f": {bytes_text(done)} of {bytes_text(total)} ({100 * done // total} %)" if total else ""
        ticker.show(f"{doing}{share}", doing=doing, bytes=done, bytes_total=total)

    return show


def attest_restore(
    data_dir: DataDir = DATA_DIR,
    database: Annotated[str, typer.Option(help="The database URL, where it is not SQLite.")] = "",
    folder: Folder = FOLDER,
    insecure: Unsigned = False,
    as_json: AsJson = False,
) -> None:
    """Say, by the authority's key, that a run goes on from a backup; then start its server again.

    Devices that have seen later versions believe it: they discard what they have of those, and go on.
    """
    from anabranch.server.restored import FILE, attest

    with ExitStack() as stack:
        authority = None if insecure else stack.enter_context(_authority(folder))
        made = attest(data_dir, database, authority)
    path = data_dir / FILE
    Output(as_json).result(
        {"file": str(path), "run_id": made.run_id, "version": made.version, "head": made.head},
        f"{path}: run {made.run_id} goes on from version {made.version}; start the server again",
    )


def rebuild(
    data_dir: DataDir = DATA_DIR,
    backup: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A backup of the run, for what the log does not have any more.", metavar="BACKUP"
        ),
    ] = None,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Make a lost or damaged anabranch.db anew, from the log beside it: no acknowledged update is lost.

    It is proved by a replay. Tags and metrics that evaluators reported are not in the log: without a backup,
    or since it was taken, they are lost.
    """
    from anabranch.server.rebuild import rebuild as make_anew

    output = Output(as_json)
    with leaving_in_order(), along_log(output, data_dir) as tell:

        def admit(config: Config) -> None:
            admit_found(config, data_dir, load_code)

        found = make_anew(data_dir, backup, admit, tell)
    output.result(
        {"data_dir": str(data_dir), **asdict(found)},
        f"{data_dir}: run {found.run_id} is whole, version {found.version}, {found.events} events; "
        "start its server again",
    )
