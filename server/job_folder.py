"""Jobs as they lie on the disk: one folder each, in the folder that a server of several runs is given.

| in `NAME/`      | what it is                                                        |
|-----------------|-------------------------------------------------------------------|
| `job.json`      | whose it is, when it was added and whether it is stopped          |
| `settings.toml` | its settings                                                      |
| `model`         | what `anabranch init` wrote                                       |
| `app.bundle`    | the code of its App, if devices are to have it                    |
| `data`          | a server's data folder like any other                             |

Whoever may write there decides what the server runs; so the folder is for its owner alone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from anabranch.core.errors import ConfigError, DataError, FolderMissing, disk_error
from anabranch.core.ids import is_id
from anabranch.core.plain import finite, from_kept, make_converter
from anabranch.identity.addresses import checked_job
from anabranch.identity.files import make_private_folder, sync_folder, tighten_tree, write_private

NOTE, SETTINGS, MODEL, BUNDLE, DATA = "job.json", "settings.toml", "model", "app.bundle", "data"
# Of `[server]`, what every job has of the server that serves it, whatever its own settings say.
OF_THE_HOST = ("address", "admin_address", "drain_s")


@dataclass(frozen=True)
class JobNote:
    """What its operator says of a job. `devices`: patterns of the names of those that may serve it."""

    added_at: float
    devices: tuple[str, ...] = ()
    stopped: bool = False


_converter = make_converter(finite)


def note_of(job: Path) -> JobNote:
    """Raises `FolderMissing` where there is no such job, `DataError` where its note is damaged."""
    file = job / NOTE
    try:
        return from_kept(json.loads(file.read_text(encoding="utf-8")), JobNote, file)
    except FileNotFoundError:
        why = _no_job(job) if job.is_dir() else f"there is no job {job.name!r} in {job.parent}"
        raise FolderMissing(why) from None
    except OSError as error:
        raise disk_error(file, error) from error
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {error}; put its copy back, or add the job anew") from None


def _no_job(job: Path) -> str:
    return (
        f"{job} has no {NOTE}, and is no job without: move it away, and add the job by `anabranch admin jobs "
        f"add {job.name}`; a {DATA} folder that it had goes to the new one's place, while no server runs"
    )


def names_in(folder: Path) -> list[str]:
    """The jobs of a folder, those of damaged notes too. Raises `FolderMissing`."""
    try:
        found = [path.name for path in folder.iterdir() if is_id(path.name) and path.is_dir()]
    except FileNotFoundError:
        raise FolderMissing(f"{folder} is not there: `anabranch admin jobs add` makes it") from None
    except OSError as error:
        raise disk_error(folder, error) from error
    return sorted(found)


def job_with(database: str, others: Mapping[str, str]) -> str:
    """The first of other jobs, of which these are the databases, that has this one; empty where none has."""
    from anabranch.server.store.factory import is_same_database  # here, as most jobs name none

    return next((name for name, its in others.items() if is_same_database(its, database)), "")


def add(
    folder: Path,
    name: str,
    settings: Path | None,
    model: Path,
    devices: Sequence[str],
    now: float,
    bundle: Path | None = None,
) -> Path:
    """A new job, whole or not at all. Raises `ConfigError` where one has its name, `StoreError`."""
    job = folder / checked_job(name)
    if isinstance(devices, str):  # each of its letters would be a pattern, and a * of everybody
        raise ConfigError(f"devices is the text {devices!r}: give a list of names or patterns")
    if not all(isinstance(pattern, str) for pattern in devices):
        raise ConfigError(f"devices: {[*devices]!r}: give each name or pattern as text")
    if not all(pattern.strip() for pattern in devices):
        raise ConfigError("devices: an empty pattern is no device's name: leave it out for all, or name some")
    taken = ConfigError(f"there is a job {name!r} in {folder}: choose another name")
    if job.is_dir() and not (job / NOTE).exists():
        raise ConfigError(_no_job(job))
    if job.exists():
        raise taken
    make_private_folder(folder)
    with _unfinished(folder, name) as made:
        if settings is None:
            write_private(made / SETTINGS, b"")
        else:
            write_private(made / SETTINGS, settings.read_bytes())
        shutil.copytree(model, made / MODEL)
        tighten_tree(made / MODEL)
        if bundle is not None:
            write_private(made / BUNDLE, bundle.read_bytes())
        _write(made, JobNote(now, tuple(devices)))
        try:
            made.rename(job)
        except OSError:
            if job.exists():  # somebody else has added one meanwhile
                raise taken from None
            raise
        sync_folder(folder)
    return job


@contextmanager
def _unfinished(folder: Path, name: str) -> Iterator[Path]:
    """A folder of ours alone that becomes another one, or is gone. Raises `StoreError`."""
    try:
        made = Path(tempfile.mkdtemp(".tmp", f".{name}.", folder))
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        yield made
    except OSError as error:
        raise disk_error(error.filename or made, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def set_stopped(job: Path, stopped: bool) -> bool:
    """Have a job stopped, or go on; returns whether that is new. Raises `FolderMissing`, `DataError`."""
    note = note_of(job)
    if note.stopped == stopped:
        return False
    _write(job, replace(note, stopped=stopped))
    return True


def _write(job: Path, note: JobNote) -> None:
    write_private(job / NOTE, (json.dumps(asdict(note)) + "\n").encode())
