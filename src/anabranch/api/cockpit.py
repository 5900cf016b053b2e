"""What the cockpit shows: folders of runs, a server's data, or a running server over its operators' port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from anabranch.api.cockpit_live import ServedRun
from anabranch.api.live_result import report_of_data
from anabranch.api.temporary import TemporaryFolder
from anabranch.client.operator import OperatorClient
from anabranch.cockpit.folder import RunFolder
from anabranch.cockpit.runs import Runs
from anabranch.cockpit.source import Source
from anabranch.core.errors import AnabranchError, FolderMissing, ProtocolError
from anabranch.identity.addresses import split_job
from anabranch.reports.journal_files import JOURNAL
from anabranch.reports.recorder import EVENTS_FILE
from anabranch.reports.result import RESULT_FILE
from anabranch.support.folders import check_folder

RUN_MARKS = (EVENTS_FILE, RESULT_FILE, JOURNAL)
DATABASE = "anabranch.db"
Opened = Callable[[str], OperatorClient]  # a connection to an address
DEPTH_MAX = 4  # of runs below a folder of them


def runs_in(what: Path, database: str = "", archive: Path | None = None) -> Runs:
    """The runs that a path stands for: one of a folder or of a stopped server's data, or many below it.

    Raises `FolderMissing`, and for a server's data what `report_of_data` does.
    """
    check_folder(what, "name the folder of a run, of runs, or a server's data_dir")
    if is_run(what):
        return _single(RunFolder(what))
    if database or (what / DATABASE).is_file():
        return _single(_of_data(what, database, archive))
    if not any(True for _ in runs_below(what)):
        raise FolderMissing(f"{what} holds no run: name the folder of a run, of runs, or a server's data_dir")
    known: dict[str, Source] = {}

    def listing() -> Iterator[Source]:
        for folder in runs_below(what):
            name = folder.relative_to(what).as_posix()
            yield known.setdefault(name, RunFolder(folder, name))

    return Runs(listing, single=False)


def runs_of_server(address: str, opened: Opened, operator: str = "") -> Runs:
    """The run of a server whose operators' port is at `address`; of several, those of all its jobs.

    `opened` makes a connection to an address, with the papers of `operator`. Raises `Unavailable`.
    """
    client = opened(address)
    if split_job(address)[1] or not _has_jobs(client):
        return _single(ServedRun(client, operator))
    return Runs(_OfJobs(address, client, opened, operator), single=False, operator=operator)


def _has_jobs(client: OperatorClient) -> bool:
    """Whether a server serves several runs, or may: the only one of another has no name."""
    try:
        return all(job.name for job in client.jobs())
    except ProtocolError:  # an older one, which has one run
        return False


def is_run(folder: Path) -> bool:
    """Whether a run lies there, whole or not."""
    return any((folder / name).is_file() for name in RUN_MARKS)


def _single(source: Source) -> Runs:
    return Runs(lambda: iter([source]), single=True)


def runs_below(folder: Path, depth: int = DEPTH_MAX) -> Iterator[Path]:
    """The folders of runs below this one, in the order of their names."""
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()):
        with suppress(OSError):  # it has gone meanwhile, or lets nobody look
            if is_run(path):
                yield path
            elif depth:
                yield from runs_below(path, depth - 1)


class _OfJobs:
    """The jobs of a server, each with a connection of its own; one is here from when it is served first."""

    def __init__(self, address: str, client: OperatorClient, opened: Opened, operator: str) -> None:
        self._address, self._client = address, client
        self._opened, self._operator = opened, operator
        self._clients: dict[str, OperatorClient] = {}
        self._shown: dict[str, Source] = {}
        self._names: list[str] = []

    def __call__(self) -> Iterator[Source]:
        """See `Listing`. While the server does not answer, those that there were."""
        with suppress(AnabranchError):
            self._names = [job.name for job in self._client.jobs()]
        self._shown = {name: self._shown[name] for name in self._names if name in self._shown}
        for name in self._names:
            with suppress(AnabranchError):  # it is not served now, and is asked for again
                yield self._source(name)

    def _source(self, name: str) -> Source:
        if name not in self._shown:
            client = self._clients.get(name) or self._opened(f"{self._address}/{name}")
            self._clients[name] = client
            self._shown[name] = ServedRun(client, self._operator, name)
        return self._shown[name]


class _OfData(RunFolder):
    """The folder that was made of a server's data, which goes with this."""

    def __init__(self, holds: TemporaryFolder, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._holds = holds


def _of_data(data_dir: Path, database: str, archive: Path | None) -> RunFolder:
    temporary = TemporaryFolder()
    folder = temporary.path / "run"
    report_of_data(data_dir, database, folder, archive)
    return _OfData(temporary, folder, data_dir.resolve().name)
