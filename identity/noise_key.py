"""The key of a private run's noise: 32 bytes of the operating system, in a file beside the run's data.

Whoever has it can take the noise off every version. So it is in no journal, snapshot, export, backup or log,
and each run has its own: the same noise in two runs would show the difference of what they added up. So the
file of a server's says which run it is of: a start from a snapshot would notice nothing.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.privacy.mechanism import KEY_BYTES
from anabranch.identity.files import make_private_folder, tighten, write_private

NOISE_KEY = "privacy.key"


def new_key(config: Config, folder: Path | None, run_id: str = "") -> bytes | None:
    """The key of a run that begins, written down if there is a `folder`, with the run's id.

    None for one whose noise is not made here. Raises `ConfigError` where there is one already, `StoreError`.
    """
    if not _has_key(config):
        return None
    key = secrets.token_bytes(KEY_BYTES)
    if folder is not None:
        path = folder / NOISE_KEY
        if path.exists():
            raise ConfigError(
                f"{path} is the noise key of another run, whose noise may not be used again: remove it, or "
                "start in another folder"
            )
        if not folder.exists():
            make_private_folder(folder)
        lines = filter(None, (key.hex(), run_id))
        write_private(path, "".join(f"{line}\n" for line in lines).encode(), replace=False)
    return key


def kept_key(config: Config, folder: Path, run_id: str = "") -> bytes | None:
    """The key of a run that has begun; None for one whose noise is not made here. Raises `DataError`.

    Where the file says of which run it is, and that is known, it must be of this one.
    """
    if not _has_key(config):
        return None
    path = folder / NOISE_KEY
    tighten(path)
    try:
        digits, _, named = path.read_text("ascii").strip().partition("\n")
        key = bytes.fromhex(digits)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: the noise of this run's versions is made of it, so without it none of them "
            "can be made or proved again; put the file there that the run was started with"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}; put the run's own key there"
        ) from None
    if len(key) != KEY_BYTES:
        raise DataError(
            f"{path} has {len(key)} bytes in hex, a key has {KEY_BYTES}: put the run's own key there"
        )
    if run_id and named and named != run_id:
        raise DataError(
            f"{path} is the key of run {named}, and this is run {run_id}: the same noise in both would show "
            "the difference of what they added up; put the run's own key there"
        )
    return key


def _has_key(config: Config) -> bool:
    """Whether the noise of a run is made here: that of masked sums is their keepers'."""
    return config.privacy.on and not config.secagg.on
