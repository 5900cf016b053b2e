"""Every error the package raises on purpose, and what each becomes outside Python.

AnabranchError
├── ConfigError              a setting is unknown, missing or out of range
│   └── AppError             the user's App cannot be loaded or breaks its contract
├── DataError                a data set is absent or malformed
│   └── FolderMissing        the folder of a run, a model or a server's data is not there
├── WireError                what a peer sent cannot be used
│   ├── InvalidUpdate        wrong shape, NaN, wrong length or digest
│   ├── ManifestMismatch     the peer speaks of another model
│   ├── TooLarge             over a cap of core/limits.py
│   ├── UnknownCodec         a codec stage this side does not have
│   └── InvalidSignature     what was signed is not what came, or by another key
├── IdentityError            a peer is not who it must be
│   ├── NotAuthenticated     no valid certificate or token: none, unknown, expired, revoked, used
│   ├── NotPermitted         a valid certificate, but for something else: another's name, another port
│   └── HistoryMismatch      the server's history is not the one that this device has seen
├── ProtocolError            a call that does not fit the state it meets
│   ├── UnknownTask          no such task, or not this client's
│   ├── UnknownVersion       a model version that is not held (any more)
│   ├── IdTaken              another update has this id
│   └── RunClosed            the run is paused, draining or finished
├── Overloaded               try again later; carries the retry window
├── Unavailable              the peer cannot be reached
├── ClocksDisagree           a certificate counts by one side's clock and not by the other's
├── StoreError               the store cannot do its work
│   ├── StoreFull            no space left; nothing was lost
│   ├── StoreUnreachable     the database does not answer, or lets nobody in
│   ├── StoreCorrupt         a digest does not match what was written
│   ├── LogLost              the log ends before an event that was acknowledged
│   ├── StoreNewer           what is stored was written by a newer release than this program
│   ├── StoreLocked          another process owns the data directory
│   └── LeadershipLost       another server has taken over: this one may write nothing more
├── PortInUse                the address to serve on is taken
├── ReplayMismatch           a replay did not reproduce the recorded digest
└── Diverged                 a run was given up: nothing that its devices sent could be used

`OUTCOMES` maps every leaf to a gRPC status and to an exit code: one table, used by the server,
the client and the command line.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

Window = tuple[float, float]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MISSING = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR)  # what may be said of a link that leads nowhere


class AnabranchError(Exception):
    """Base of all deliberate errors. The message says what is wrong and how to mend it.

    `retry_after_s`: when the call should come again, (earliest, latest) in seconds, where the peer said so.
    """

    retry_after_s: Window | None = None


class ConfigError(AnabranchError):
    """A setting is unknown, missing or out of range."""


class AppError(ConfigError):
    """The user's App cannot be loaded or breaks its contract."""


class DataError(AnabranchError):
    """A data set is absent or malformed."""


class FolderMissing(DataError):
    """The folder of a run, a model or a server's data is not where it was said to be."""


class WireError(AnabranchError):
    """What a peer sent cannot be used."""


class InvalidUpdate(WireError):
    """An update of wrong shape, length or digest, or with values that are not finite."""


class ManifestMismatch(WireError):
    """The peer speaks of another model: its manifest hash differs."""


class TooLarge(WireError):
    """Over a cap of `core/limits.py`."""


class UnknownCodec(WireError):
    """A codec stage that this side does not have."""


class InvalidSignature(WireError):
    """What was signed is not what came, or it was signed by another key."""


class IdentityError(AnabranchError):
    """A peer is not who it must be."""


class NotAuthenticated(IdentityError):
    """No valid certificate or token: there is none, or it is unknown, expired, revoked or used."""


class NotPermitted(IdentityError):
    """A valid certificate, but for something else: another's name, another port."""


class HistoryMismatch(IdentityError):
    """The server's history is older than the one that this device has seen, or another one."""


class ProtocolError(AnabranchError):
    """A call that does not fit the state it meets."""


class UnknownTask(ProtocolError):
    """No such task, or it is not this client's."""


class UnknownVersion(ProtocolError):
    """A model version that is not held, or not any more."""


class IdTaken(ProtocolError):
    """Another update has this id: of another client or task, or with other bytes."""


class RunClosed(ProtocolError):
    """The run is paused, draining or finished."""


class Overloaded(AnabranchError):
    """Try again within the retry window `retry_after_s` = (earliest, latest), in seconds."""

    def __init__(self, message: str, retry_after_s: Window = (1.0, 5.0)) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(AnabranchError):
    """The peer cannot be reached; the call is safe to repeat."""

    reached = True  # False where not even a connection came about
    unanswered = False  # True where no answer came: the peer may have done what it was asked, or do it yet


class ClocksDisagree(AnabranchError):
    """A certificate counts by one side's clock and not by the other's: repeat the call until it does."""

    retry_after_s = (1.0, 30.0)  # somebody has to set a clock, or it does so by itself


class StoreError(AnabranchError):
    """The store cannot do its work."""

    own_disk = False  # True of this process's: what a peer says of its own comes without


class StoreFull(StoreError):
    """No space left on the device; nothing that was acknowledged is lost."""

    retry_after_s = (1.0, 5.0)  # somebody has to make room


def disk_error(place: object, error: OSError, hint: str = "") -> StoreError:
    """What the operating system says of a file or folder: `StoreFull` or `StoreError`, which names it.

    `hint`: what to add where it is not the disk that is full.
    """
    if error.errno in NO_SPACE:
        found: StoreError = StoreFull(f"{place}: no space left on the disk: make room")
    else:
        missing = isinstance(error.filename, str) and error.errno in _MISSING
        why = broken_link(Path(error.filename)) if missing else ""
        found = StoreError(f"{place} cannot be used: {why or error.strerror or error}{hint}")
    found.own_disk = True
    return found


def broken_link(path: Path) -> str:
    """Which link of a path leads nowhere, as one whose disk is not mounted; empty if none is seen to.

    The operating system says that something is there, and that nothing is.
    """
    with suppress(OSError):  # it cannot be looked at: what was wanted of it has failed by that as well
        for each in (path, *path.parents):
            if each.is_symlink():
                leads_to = each.readlink()
                try:
                    each.stat()
                except FileNotFoundError:
                    return f"{each} is a link to {leads_to}, which is not there"
    return ""


@contextmanager
def on_disk(place: object) -> Iterator[None]:
    """Inside, what the operating system says of a file becomes a `disk_error`, of `place` if unnamed."""
    try:
        yield
    except OSError as error:
        raise disk_error(error.filename or place, error) from error


class StoreUnreachable(StoreError):
    """The database does not answer, or lets nobody in."""


class StoreCorrupt(StoreError):
    """A digest does not match what was written."""


class LogLost(StoreError):
    """The log ends before an event that was acknowledged, or is not the one that was."""


UPGRADE = "a newer release has written it; upgrade anabranch"


class StoreNewer(StoreError):
    """What is stored was written by a newer release than this program."""


def check_format(place: object, said: object, newest: int) -> None:
    """Raises `StoreNewer` where what a place has says that it is of a newer format than is known."""
    if isinstance(said, int) and said > newest:
        raise StoreNewer(f"{place} is of format {said}: {UPGRADE}")


class StoreLocked(StoreError):
    """Another process owns the data directory."""


class LeadershipLost(StoreError):
    """Another server has taken over the run: this one may write nothing more, and stops."""


class PortInUse(AnabranchError):
    """The address to serve on is taken."""


NOT_ALIKE = (
    "its files or the program were changed, or a part of one's own (a strategy, an App) gives other results "
    "for the same arguments: one that draws by itself, or reads a clock"
)


class ReplayMismatch(AnabranchError):
    """A replay did not reproduce the recorded digest: see `NOT_ALIKE` for why that may be."""


class Diverged(AnabranchError):
    """A run was given up: nothing that its devices sent could be used."""


@dataclass(frozen=True)
class Outcome:
    """What an error becomes outside: a gRPC status by name and a process exit code.

    `retryable`: repeating the same call may help.
    """

    grpc_status: str
    exit_code: int
    retryable: bool = False


OUTCOMES: dict[type[AnabranchError], Outcome] = {
    ConfigError: Outcome("INVALID_ARGUMENT", 2),
    AppError: Outcome("INVALID_ARGUMENT", 3),
    DataError: Outcome("FAILED_PRECONDITION", 4),
    FolderMissing: Outcome("FAILED_PRECONDITION", 5),
    InvalidUpdate: Outcome("INVALID_ARGUMENT", 10),
    ManifestMismatch: Outcome("FAILED_PRECONDITION", 11),
    TooLarge: Outcome("OUT_OF_RANGE", 12),
    UnknownCodec: Outcome("UNIMPLEMENTED", 13),
    InvalidSignature: Outcome("INVALID_ARGUMENT", 14),
    UnknownTask: Outcome("NOT_FOUND", 20),
    UnknownVersion: Outcome("NOT_FOUND", 21),
    RunClosed: Outcome("FAILED_PRECONDITION", 22),
    Overloaded: Outcome("RESOURCE_EXHAUSTED", 23, retryable=True),
    Unavailable: Outcome("UNAVAILABLE", 24, retryable=True),
    IdTaken: Outcome("ALREADY_EXISTS", 25),
    StoreFull: Outcome("RESOURCE_EXHAUSTED", 30, retryable=True),
    StoreCorrupt: Outcome("DATA_LOSS", 31),
    StoreNewer: Outcome("FAILED_PRECONDITION", 32),
    StoreLocked: Outcome("FAILED_PRECONDITION", 33),
    PortInUse: Outcome("UNAVAILABLE", 34),
    LeadershipLost: Outcome("UNAVAILABLE", 35, retryable=True),
    StoreUnreachable: Outcome("UNAVAILABLE", 36),
    StoreError: Outcome("INTERNAL", 37),
    LogLost: Outcome("DATA_LOSS", 38),
    ReplayMismatch: Outcome("DATA_LOSS", 40),
    Diverged: Outcome("FAILED_PRECONDITION", 41),
    NotAuthenticated: Outcome("UNAUTHENTICATED", 50),
    NotPermitted: Outcome("PERMISSION_DENIED", 51),
    HistoryMismatch: Outcome("FAILED_PRECONDITION", 52),
    ClocksDisagree: Outcome("UNAVAILABLE", 53, retryable=True),
}

FALLBACK = Outcome("INTERNAL", 1)


ERRORS_BY_NAME = {cls.__name__: cls for cls in OUTCOMES}
# Of a failed call's trailing metadata: the class's name; when to come again, "earliest,latest" in seconds.
ERROR_KEY, RETRY_KEY = "anabranch-error", "retry-after-s"


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of an error: its own, or that of the nearest base that has one."""
    for cls in type(error).__mro__:
        if cls in OUTCOMES:
            return OUTCOMES[cls]
    return FALLBACK
