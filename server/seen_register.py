"""Whether the authority's register was taken back to a backup.

Who was revoked since would be let in again, so the server remembers, beside its data, how often the register
had been written to, and does not start on an older one until somebody has looked.
"""

from __future__ import annotations

import json
from pathlib import Path

from anabranch.core.errors import ConfigError
from anabranch.identity.authority import Authority
from anabranch.identity.files import write_private

FILE = "register.json"


def check_register(data_dir: Path, authority: Authority, known: int = 0) -> None:
    """Remember how far the register is. Raises `ConfigError` if it had been further, be it `known` alone."""
    path = data_dir / FILE
    seen = _read(path)
    noted, now = seen.get(authority.sha256, 0), authority.changes
    before = max(noted, known)
    if (furthest := max(before, now)) > noted:
        write_private(path, json.dumps({**seen, authority.sha256: furthest}).encode())
    if now < before:
        raise ConfigError(
            f"{authority.folder} is older than this server has seen it ({now} of {before} changes): who was "
            "revoked since would be let in. Run `anabranch admin ca restored`, then revoke them again"
        )


def _read(path: Path) -> dict[str, int]:
    try:
        return {str(sha256): int(count) for sha256, count in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it if the authority is the newest") from error
