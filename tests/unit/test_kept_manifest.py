"""The manifest that a server keeps beside its data: written once, and mended where it is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anabranch.server.manifest import (
    INITIAL,
    MANIFEST,
    Manifest,
    keep_manifest,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})


def test_it_is_written_once(tmp_path: Path, manifest: Manifest) -> None:
    kept = tmp_path / "data" / "manifest"
    kept.parent.mkdir()
    keep_manifest(kept, manifest)
    written_at = (kept / MANIFEST).stat().st_mtime_ns
    keep_manifest(kept, manifest)
    assert (kept / MANIFEST).stat().st_mtime_ns == written_at
    assert read_manifest(kept).initial_sha256 == manifest.initial_sha256
    assert [path.name for path in kept.parent.iterdir()] == ["manifest"]


@pytest.mark.parametrize("name", [MANIFEST, INITIAL])
@pytest.mark.parametrize("left", [b"", b"\0" * 100, None], ids=["empty", "zeros", "gone"])
def test_one_that_cannot_be_read_is_replaced(
    name: str, left: bytes | None, tmp_path: Path, manifest: Manifest
) -> None:
    kept = tmp_path / "manifest"
    keep_manifest(kept, manifest)
    (kept / name).unlink()
    if left is not None:
        (kept / name).write_bytes(left)
    keep_manifest(kept, manifest)
    assert read_manifest(kept).initial_sha256 == manifest.initial_sha256
