"""Configurations as the text of a TOML file. Python's own library reads TOML and does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def setting_text(value: object) -> str:
    """A value as TOML spells it."""
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{k} = {setting_text(v)}" for k, v in value.items()) + " }" if value else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(setting_text, value)) + "]"
    # What TOML forbids and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as a file has them; those that are empty are left out."""
    blocks = (
        "\n".join([f"[{table}]", *(f"{key} = {setting_text(value)}" for key, value in keys.items())]) + "\n"
        for table, keys in tables.items()
        if keys
    )
    return "\n".join(blocks)
