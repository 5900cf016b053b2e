"""Whether the authority's register was taken back to a backup.

Who was revoked since would be let in again, so the server remembers, beside its data, how far the register
had come, and does not start on one that has not come from there until somebody has looked.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path

from anabranch.core.errors import UPGRADE, ConfigError, StoreError, StoreNewer
from anabranch.identity.authority import Authority
from anabranch.identity.files import write_private
from anabranch.identity.register import RegisterPoint

log = logging.getLogger(__name__)

FILE = "register.json"

_writing = threading.Lock()  # the event loop's thread and the one that looks into the register


def check_register(data_dir: Path, authority: Authority, known: RegisterPoint) -> None:
    """Remember how far the register is.

    Raises `ConfigError` unless it has come from where it had been seen, be it `known` alone.
    """
    with _writing:
        seen = _read(data_dir / FILE)
        noted, now = seen.get(authority.sha256, RegisterPoint()), authority.point
        before = max(noted, known, key=lambda point: point.changes)
        lost = _lost(authority, noted, known)
        if (newest := before if lost else now) != noted:
            _write(data_dir / FILE, {**seen, authority.sha256: newest})
    _refuse(authority, lost)


def check_seen(data_dir: Path, authority: Authority, known: RegisterPoint) -> None:
    """As `check_register`, of a server that does not lead yet: nothing is remembered."""
    with _writing:
        noted = _read(data_dir / FILE).get(authority.sha256, RegisterPoint())
    _refuse(authority, _lost(authority, noted, known))


def _lost(authority: Authority, noted: RegisterPoint, known: RegisterPoint) -> str:
    return authority.lost(noted) or authority.lost(known)


def _refuse(authority: Authority, lost: str) -> None:
    if lost:
        raise ConfigError(
            f"{authority.folder} is older than this server has seen it ({lost}): who was revoked since would "
            "be let in. Run `anabranch admin ca restored`, then revoke them again"
        )


class SeenRegister:
    """Notes at once how far a register has come: the server may be killed. From any thread."""

    def __init__(self, data_dir: Path, authority: Authority) -> None:
        self._path, self._sha256 = data_dir / FILE, authority.sha256
        self._failed = False

    def note(self, point: RegisterPoint) -> bool:
        """Whether that is on the disk. If it is not, that is said: nobody is kept out or let in by it."""
        if not self._path.parent.is_dir():  # of jobs, of which none was added yet
            return False
        try:
            with _writing:
                seen = _read(self._path)
                if point.changes > seen.get(self._sha256, RegisterPoint()).changes:
                    _write(self._path, {**seen, self._sha256: point})
        except (ConfigError, StoreError) as error:
            if not self._failed:
                log.warning("an older register would not be noticed after a crash now: %s", error)
            self._failed = True
            return False
        self._failed = False
        return True


def _read(path: Path) -> dict[str, RegisterPoint]:
    try:
        return {str(sha256): _point(said) for sha256, said in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except StoreNewer as error:
        raise StoreNewer(f"{path} {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it if the authority is the newest") from error


def _point(said: object) -> RegisterPoint:
    """As it is written, or as earlier programs did: the changes alone."""
    if isinstance(said, dict) or (isinstance(said, list) and len(said) > len(fields(RegisterPoint))):
        raise StoreNewer(f"says more of a register than is known here: {UPGRADE}")
    if not isinstance(said, list):
        return RegisterPoint(int(said))  # type: ignore[call-overload]
    changes, marked, mark = said
    return RegisterPoint(int(changes), int(marked), str(mark))


def _write(path: Path, seen: Mapping[str, RegisterPoint]) -> None:
    write_private(path, json.dumps({sha256: astuple(point) for sha256, point in seen.items()}).encode())
