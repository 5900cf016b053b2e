"""Canonical JSON: the bytes that were signed and hashed ever since."""

from __future__ import annotations

from anabranch.core.canonical import canonical


def test_keys_are_sorted_at_every_depth_and_letters_are_ascii() -> None:
    data = {"b": [1, 2.5, {"z": None, "y": True}], "a": "é"}
    assert canonical(data) == b'{"a":"\\u00e9","b":[1,2.5,{"y":true,"z":null}]}'
