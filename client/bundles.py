"""The bundles of a device: fetched once by their digest, opened if their signer is allowed, then unpacked.

    bundles/SHA256.bundle    what came, whole
    bundles/SHA256.part      as much as has come so far
    bundles/SHA256/          the files of the one whose App is run
    bundles/newest.json      how new the next one must be: `bundle_dates`

Whether a signer is allowed is asked each time before a bundle is run, and nothing of it is unpacked before.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from anabranch.client.bundle_dates import FILE as DATES
from anabranch.client.bundle_dates import BundleDates
from anabranch.client.listed import ListedBundle, ListedJob
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    DataError,
    InvalidUpdate,
    TooLarge,
    disk_error,
    on_disk,
)
from anabranch.core.limits import BUNDLE_BYTES_MAX
from anabranch.identity.bundle import Bundle, check_allowed, open_bundle
from anabranch.identity.files import make_private_folder, private

FOLDER = "bundles"  # in a device's state folder
WHOLE, PART = ".bundle", ".part"
_HEX = re.compile(r"[0-9a-f]{64}\Z")


class Office(Protocol):
    """Where bundles come from."""

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a job's bundle from an offset on, each piece with where it begins."""
        ...


class BundleFiles:
    """Those in a device's folder. `signers`: whose are run."""

    def __init__(self, state_dir: Path, signers: Collection[str]) -> None:
        self._folder, self._signers = state_dir / FOLDER, signers
        self._dates = BundleDates(self._folder)

    def prepare(self, office: Office, job: ListedJob, bundle: ListedBundle) -> tuple[Path, Bundle]:
        """A job's bundle, which is fetched unless it is here, and the folder in which its files are now.

        Raises `NotPermitted` for a signer that is not allowed, before anything is fetched where the server
        says so already, and for a bundle older than what was run of its signer and name; what `open_bundle`,
        `check_needs` and the office raise; and `StoreError`.
        """
        _check_listed(bundle)
        check_allowed(bundle.signer, self._signers)
        opened = self._opened(bundle.sha256) or self._fetched(office, job, bundle)
        self._dates.check(opened)
        check_needs(opened)
        self._dates.note(opened)
        return unpack(opened, self._folder / bundle.sha256), opened

    def keep(self, sha256s: Collection[str]) -> None:
        """Only those of these digests stay. Raises `StoreError`."""
        with on_disk(self._folder):
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                if path.name == DATES or path.name.partition(".")[0] in sha256s:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _opened(self, sha256: str) -> Bundle | None:
        """The one that is here; None: it is not, or was damaged since. Raises as `open_bundle`."""
        path = self._folder / f"{sha256}{WHOLE}"
        with on_disk(path):
            data = path.read_bytes() if path.is_file() else b""
        return open_bundle(data, self._signers) if hashlib.sha256(data).hexdigest() == sha256 else None

    def _fetched(self, office: Office, job: ListedJob, bundle: ListedBundle) -> Bundle:
        part = self._folder / f"{bundle.sha256}{PART}"
        make_private_folder(self._folder)
        with on_disk(part):
            _receive(part, bundle.size_bytes, lambda offset: office.bundle(job, bundle, offset))
            data = part.read_bytes()
            try:
                if hashlib.sha256(data).hexdigest() != bundle.sha256:
                    raise InvalidUpdate("the bundle that came is not the listed one: its SHA-256 differs")
                opened = open_bundle(data, self._signers)
            except AnabranchError:
                part.unlink()
                raise
            part.replace(self._folder / f"{bundle.sha256}{WHOLE}")
        return opened


def _receive(part: Path, size_bytes: int, pieces: Callable[[int], Iterator[tuple[int, bytes]]]) -> None:
    """Fill a file up to its size, from where it ends. Raises `InvalidUpdate` for what does not fit."""
    with open(part, "ab", opener=private) as file:
        at = file.tell()
        if at > size_bytes:
            at = file.truncate(0)
        for offset, data in pieces(at) if at < size_bytes else ():
            if offset != at or at + len(data) > size_bytes:
                raise InvalidUpdate(f"a piece of a bundle at {offset}: expected one at {at}")
            file.write(data)
            at += len(data)


def read_bundle(file: Path, signers: Collection[str] | None = None) -> Bundle:
    """The bundle of a file; see `open_bundle`. Raises `DataError` where there is no such file."""
    try:
        with file.open("rb") as content:
            data = content.read(BUNDLE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise DataError(f"{file} is not there: `anabranch bundle make` makes a bundle") from None
    except OSError as error:
        raise disk_error(file, error) from error
    return open_bundle(data, signers)


def unpack(bundle: Bundle, folder: Path) -> Path:
    """Write a bundle's files into a folder for its owner alone, in the place of what was there.

    Raises `StoreError`.
    """
    with on_disk(folder):
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        for path, data in bundle.files.items():
            make_private_folder((folder / path).parent)
            with open(folder / path, "xb", opener=private) as file:
                file.write(data)
    return folder


def check_needs(bundle: Bundle) -> None:
    """Raises `ConfigError`, naming all that is missing, where this machine cannot run a bundle."""
    manifest = bundle.manifest
    if sys.version_info[:2] < manifest.python:
        running = "{}.{}".format(*sys.version_info[:2])
        wanted = manifest.requires_python
        raise ConfigError(f"bundle {manifest.name}: it needs Python {wanted}, and this is {running}")
    missing = [name for name in manifest.needs if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"bundle {manifest.name}: {', '.join(missing)} must be installed on this device, and a bundle "
            f"installs nothing: pip install {' '.join(missing)}"
        )


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_listed(bundle: ListedBundle) -> None:
    """What becomes a file's name is a digest. Raises `InvalidUpdate`, `TooLarge`."""
    for name, text in (("SHA-256", bundle.sha256), ("signer", bundle.signer)):
        if not _HEX.match(text):
            raise InvalidUpdate(f"the server lists a bundle with a {name} {text[:64]!r}, which is none")
    if bundle.size_bytes > BUNDLE_BYTES_MAX:
        raise TooLarge(f"the server lists a bundle of {bundle.size_bytes} bytes, at most {BUNDLE_BYTES_MAX}")
