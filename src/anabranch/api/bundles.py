"""Bundles of Apps in Python: made and signed from the files of an App, and looked into."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from anabranch.api.bundle_sources import Sources
from anabranch.client.bundles import read_bundle, unpack
from anabranch.core.errors import AppError, ConfigError
from anabranch.identity.bundle import Bundle, open_bundle, pack
from anabranch.identity.files import write_private
from anabranch.identity.signers import checked_signers, read_signer
from anabranch.support.own_imports import module_of
from anabranch.workloads.app import load_app
from anabranch.workloads.bundled import bundled_spec


def make_bundle(
    app: str,
    key: str | Path,
    out: str | Path,
    *,
    name: str = "",
    include: Sequence[str] = (),
    needs: Sequence[str] = (),
    python: str = "",
    created_at: int | None = None,
) -> Bundle:
    """Write the bundle of an App, `path/to/file.py:App`, signed with the key of `anabranch bundle key`.

    In it are the App's file, what that imports from its own folder, and the files of `include`, patterns from
    that folder. `needs`: distributions that a device must have beside those that are imported. `python`: the
    oldest that it runs on, `3.11`; that of this process if not given. `created_at`: seconds since 1970. It is
    opened and loaded once, as a device does. Raises `ConfigError`, `AppError`, `DataError`, `TooLarge`.
    """
    file, attribute = _place(app)
    signer = read_signer(Path(key))
    root, module = module_of(file)
    sources = Sources(root)
    sources.follow(file)
    for pattern in include:
        sources.include(pattern)
    data = pack(
        sources.contents(),
        signer,
        name=name or module.rpartition(".")[2],
        entry=f"{module}:{attribute}",
        created_at=int(time.time()) if created_at is None else created_at,
        requires_python=f">={python or '{}.{}'.format(*sys.version_info[:2])}",
        needs={*needs, *sources.needs()},
    )
    bundle = open_bundle(data)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = unpack(bundle, Path(folder) / "bundle")
        load_app(bundled_spec(unpacked, bundle.manifest.entry))
    write_private(Path(out), data)
    return bundle


def show_bundle(file: str | Path, signers: Sequence[str] | None = None) -> Bundle:
    """What a bundle is, once its signature is found good. `signers`: who may have signed it; None: anybody.

    Raises as `open_bundle`, `DataError` where there is no such file, `ConfigError` for what is no signer.
    """
    return read_bundle(Path(file), None if signers is None else checked_signers(signers))


def _place(app: str) -> tuple[Path, str]:
    """The file of `path/to/file.py:App`, and the App's name in it. Raises `ConfigError`, `AppError`."""
    where, _, attribute = app.rpartition(":")
    if not where.endswith(".py") or not attribute.isidentifier():
        raise ConfigError(f"App {app!r}: a bundle is made of path/to/file.py:App")
    file = Path(where).expanduser().absolute()
    if not file.is_file():
        raise AppError(f"{where}: there is no such file")
    return file, attribute
