"""Options that several commands share. They import little, as `health` has some of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.output import for_programs
from anabranch.core.errors import NO_SPACE, ConfigError, disk_error

_WENT: dict[Path, Path] = {}  # where code of one's own has gone, from where a command was typed
FOLDER_NAME_BYTES_MAX = 240  # disks take 255, and of several runs of a name each has a number behind it

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, for programs.", callback=for_programs)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: table.key=value. Repeatable.", metavar="KEY=VALUE"),
]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write.", metavar="DIR")]
ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file.", metavar="CONFIG")]
Identity = Annotated[
    Path | None,
    typer.Option("--identity", help="What `anabranch admin operator` wrote.", metavar="DIR"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Speak to another machine without encryption or authentication.")
]
FlowerFolder = Annotated[
    Path | None, typer.Option("--flower", help="A Flower app's folder, as the App.", metavar="DIR")
]
Archive = Annotated[
    Path | None,
    typer.Option("--archive", help="The server.archive of what the log has dropped.", metavar="DIR"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file, where there is one.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")]


def parse_shard(text: str) -> tuple[int, int]:
    """`3/8` as (index, count), from 0. Raises `ConfigError`."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--shard {text!r}: write INDEX/COUNT with INDEX from 0, for example 3/8")
    return int(index), int(count)


def app_spec(app: str, flower: Path | None) -> str:
    """The App that was named, in one of the two ways. Raises `ConfigError`."""
    if bool(app) == (flower is not None):
        raise ConfigError("name one App: APP, or --flower DIR for the folder of a Flower app")
    return app or f"flower:{flower}"


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` as a pair; the value is read as TOML, or else as a string. Raises `ConfigError`."""
    from anabranch.core.config.tables import parse_override  # here, as `health` reads none

    key, equals, _ = text.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"--option {text!r}: write key=value")
    _, name, value = parse_override(f"option.{text}")
    return name, value


def check_new(file: Path, force: bool) -> None:
    """Raises `ConfigError` for a file that somebody has named, which is there, and may be any other one.

    Not for what can only be written to, such as a pipe or /dev/stdout, nor for a folder, which cannot.
    """
    if file.is_file() and not force:
        raise ConfigError(f"{file} is there already: name another file, or replace this one with --force")


def file_to_write(named: Path | None, default: Path, force: bool) -> Path:
    """The one that somebody has named, see `check_new`, or the default, which is written anew."""
    if named is None:
        return default
    check_new(named, force)
    return named


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, a folder is written: a full disk is said of it. Raises `StoreFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise disk_error(folder, error) from error


@contextmanager
def coming_back() -> Iterator[None]:
    """Inside, code of one's own runs, which may change the working directory; outside, paths are as typed.

    The next time it is where it has gone to.
    """
    home = Path.cwd()
    os.chdir(_WENT.get(home, home))
    try:
        yield
    finally:
        with suppress(OSError):  # it may have removed that folder
            _WENT[home] = Path.cwd()
        os.chdir(home)


def run_folder(name: str, strategy: str, seed: int | str) -> Path:
    """Where a run goes if nobody says where: runs/<name>-<strategy>-seed<seed>; or `seeds`, of several.

    Raises `ConfigError` where that is no name for a folder.
    """
    last = seed if isinstance(seed, str) else f"seed{seed}"
    folder = Path("runs") / f"{name}-{short_name(strategy)}-{last}"
    if any(len(os.fsencode(part)) > FOLDER_NAME_BYTES_MAX for part in folder.parts):
        raise ConfigError(
            f"run.name = '{name[:20]}...' has {len(name)} characters, too many for the name of the run's "
            "folder: shorten it, or name the folder with --out"
        )
    return folder


def parse_seeds(text: str) -> list[int]:
    """`0..4` as 0, 1, 2, 3, 4, and `1,3,7` as these. Raises `ConfigError`."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    if not all(word.strip().isdecimal() for word in words) or (dots and int(first) > int(last)):
        raise ConfigError(f"--seeds {text!r}: write FROM..TO, for example 0..4, or 1,3,7")
    return list(range(int(first), int(last) + 1)) if dots else list(dict.fromkeys(map(int, words)))


def short_name(part: str) -> str:
    """What a part is called in a file's name: `Mine` for `path/to/file.py:Mine`."""
    return part.rpartition(":")[2]
