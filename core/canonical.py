"""Canonical JSON: the one way to write what is signed or hashed. The log has its own writer: `journal.py`."""

from __future__ import annotations

import json
from typing import Any


def canonical(data: Any) -> bytes:
    """Plain data as JSON in ASCII: sorted keys, no spaces, no end of line."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
