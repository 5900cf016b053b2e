"""Whether a state is data: what a snapshot has of it is the same state again.

A strategy of one's own may keep what no snapshot has as it is: a set, a number of numpy, a dictionary by
whole numbers, which comes back by texts. A run with such a state would end at
its first snapshot, or go on after a restart as another one. So would one that has the model's own array, on
which later steps write, until a restart makes two arrays of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from anabranch.core.engine.shelf import Shelved
from anabranch.core.errors import AppError
from anabranch.core.model.arrays import to_bytes
from anabranch.core.model.params import Vector
from anabranch.core.plain import FieldError
from anabranch.core.snapshot import DATA, packed, type_name, unpacked


def check_kept(whose: str, state: Any, state_type: type[Any], vector: Vector) -> None:
    """Raises `AppError`, naming the field, where a state is not what a restart would make of it.

    `vector`: the model beside it, shape (size,).
    """
    if not isinstance(state, state_type):
        kind = type(state).__name__
        raise AppError(f"{whose}: the state is a {kind}, and state_type says {state_type.__name__}; {DATA}")
    if why := lost(state, state_type, vector):
        raise AppError(f"{whose}: the state would not outlive a restart: {why}; {DATA}")


def lost(state: Any, state_type: type[Any], vector: Vector) -> str:
    """The first thing of a state that is another one after a restart; empty: nothing is."""
    arrays: dict[str, Any] = {}
    holds: list[Shelved] = []
    try:
        plain = packed(state, "state", arrays, holds)
        if own := next((at for at, array in arrays.items() if np.may_share_memory(array, vector)), ""):
            return f"{own} is the model's own array, on which later steps write: keep a copy of it"
        if holds:  # a memory of devices, which is ours: what lies on a shelf is read by its name
            return ""
        back = unpacked(json.loads(json.dumps(plain)), arrays, state_type)
    except FieldError as error:
        return str(error)
    return _other(state, back, "state")


def _other(one: Any, back: Any, at: str) -> str:
    """Where two values differ, by type or value."""
    if one is back:
        return ""
    if isinstance(one, np.ndarray) and isinstance(back, np.ndarray):
        alike = (one.dtype, one.shape) == (back.dtype, back.shape)
        same = alike and bytes(to_bytes(one)) == bytes(to_bytes(back))
        return "" if same else f"{at} comes back as another array"
    if isinstance(one, Mapping) and isinstance(back, Mapping):
        if strange := [key for key in one if key not in back]:
            return f"{at} has the key {strange[0]!r} ({type_name(strange[0])}), which comes back as a text"
        return next((why for k in one if (why := _other(one[k], back[k], f"{at}[{k!r}]"))), "")
    if type(one) is not type(back):
        return f"{at} is a {type_name(one)} and comes back as a {type_name(back)}"
    if is_dataclass(one) and not isinstance(one, type):
        names = [f.name for f in fields(one)]
        return next((w for n in names if (w := _other(getattr(one, n), getattr(back, n), f"{at}.{n}"))), "")
    if isinstance(one, list | tuple):
        pairs = enumerate(itertools.zip_longest(one, back))
        return next((why for i, (a, b) in pairs if (why := _other(a, b, f"{at}[{i}]"))), "")
    return "" if one == back or one != one else f"{at} is {one!r} and comes back as {back!r}"
