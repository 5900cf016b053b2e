"""Digests of payloads as the packages of others make them, for comparison with ours."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest


def package() -> Any:
    """The package `blake3`; a test that needs it is skipped where it is not installed."""
    return pytest.importorskip("blake3", reason="blake3 is not installed: pip install 'anabranch[blake3]'")


def named(data: bytes, algorithm: str) -> str:
    """What records call these bytes."""
    if algorithm == "sha256":
        return hashlib.sha256(data).hexdigest()
    return f"blake3-{package().blake3(data).hexdigest()}"
