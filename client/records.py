"""Arrays with a few facts about them, in one file that is whole or not there.

A file is written under another name and then renamed. It carries a digest of itself, so what a disk has
damaged is noticed and counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from anabranch.core.errors import disk_error
from anabranch.core.model.arrays import plain_tensors, to_bytes
from anabranch.identity.files import make_private_folder, private, sync_folder

log = logging.getLogger(__name__)

SUFFIX, UNFINISHED = ".safetensors", ".tmp"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Record:
    """`facts` are JSON values."""

    arrays: Arrays
    facts: Mapping[str, Any]


def write_record(path: Path, record: Record, durable: bool) -> None:
    """Write a record in the place of an older one. `durable`: it outlives a power cut.

    Raises `StoreError`, and `StoreFull` where there is no space.
    """
    arrays = plain_tensors(record.arrays)
    facts = json.dumps({**record.facts, "sha256": _digest(arrays, record.facts)})
    unfinished = path.with_suffix(UNFINISHED)
    try:
        make_private_folder(path.parent)
        with open(unfinished, "wb", opener=private) as file:
            file.write(save(arrays, {"facts": facts}))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        unfinished.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is no folder
            unfinished.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def read_record(path: Path) -> Record | None:
    """A record, or None where there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        sha256 = facts.pop("sha256")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        log.warning("%s is damaged and not used: %s", path, error)
        return None
    if _digest(arrays, facts) != sha256:
        log.warning("%s is damaged and not used: its digest differs", path)
        return None
    return Record(arrays, facts)


def _digest(arrays: Arrays, facts: Mapping[str, Any]) -> str:
    sha = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(arrays):
        sha.update(f"{name} {arrays[name].dtype.name} {arrays[name].shape}".encode())
        sha.update(to_bytes(arrays[name]))
    return sha.hexdigest()
