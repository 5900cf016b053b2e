"""Canonical JSON: how what is signed is written, and what devices, servers and keepers hash alike.

The log has its own writer of the same form, `journal.py`. Digests of layouts and of states are of JSON with
spaces, and stay so.
"""

from __future__ import annotations

import json
from typing import Any


def canonical(data: Any) -> bytes:
    """Plain data as JSON in ASCII: sorted keys, no spaces, no end of line."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
