"""What every kit asks first: is this a part of its kind at all?"""

from __future__ import annotations

from typing import Any

from anabranch.core.parts import PartKind, name_of


def check_of_kind(kind: PartKind, part: Any) -> None:
    """Raises `ConfigError` in the words in which a command line refuses it; what is built in has passed."""
    name = name_of(part)
    assert name, f"this {kind.word} needs a name of its own"
    if name not in kind.built_in:
        kind.check(part, name)
