"""How new a bundle must be: no older than the newest that this device has run of the same signer and name.

A bundle is signed once and for all, so that whoever lists it can list it again: code with a fault that was
mended since would be run anew. What has been run is remembered in one file of the device's own.

    newest.json    {signer: {name of the bundle: created_at of the newest, in s since 1970}}
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from anabranch.core.errors import DataError, NotPermitted, on_disk
from anabranch.identity.bundle import Bundle
from anabranch.identity.files import write_private

FILE = "newest.json"


class BundleDates:
    """Those of a folder, which must be there when one is noted."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def check(self, bundle: Bundle) -> None:
        """Raises `NotPermitted` for one that is older than what was run; `DataError`, `StoreError`."""
        manifest = bundle.manifest
        newest = self._read().get(bundle.signer, {}).get(manifest.name)
        if newest is not None and manifest.created_at < newest:
            raise NotPermitted(
                f"bundle {manifest.name} is of {_date(manifest.created_at)}, and this device has run one of "
                f"that name and signer of {_date(newest)}: an older one is not run again. Make it anew with "
                "`anabranch bundle make`, and with --name if it is another App"
            )

    def note(self, bundle: Bundle) -> None:
        """This one is run: nothing older is, from now on. Raises `DataError`, `StoreError`."""
        manifest, known = bundle.manifest, self._read()
        of_signer = known.setdefault(bundle.signer, {})
        newest = of_signer.get(manifest.name)
        # Since `check` another process may have run a newer one.
        if newest is None or manifest.created_at > newest:
            of_signer[manifest.name] = manifest.created_at
            write_private(self._file, json.dumps(known, sort_keys=True).encode())

    def _read(self) -> dict[str, dict[str, int]]:
        with on_disk(self._file):
            text = self._file.read_bytes() if self._file.exists() else b"{}"
        try:
            found = json.loads(text)
            return {s: {name: int(at) for name, at in names.items()} for s, names in found.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"{self._file} cannot be read: put a copy of it back, or remove it if no bundle is too old"
            ) from None


def _date(at: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{at} s after 1970"
