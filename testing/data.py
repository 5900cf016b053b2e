"""A state as data: written as a snapshot has it, and read again."""

from __future__ import annotations

import json
from typing import Any, Protocol

from anabranch.core.snapshot import packed, unpacked


class Stateful(Protocol):
    """A strategy or a planner."""

    @property
    def state_type(self) -> type[Any]:
        """What its states are."""
        ...


def frozen(of: Stateful, state: Any) -> str:
    """All that is in a state, as text. Fails where it is of another type than it says, or no data."""
    arrays: dict[str, Any] = {}
    meta = packed(state, "state", arrays)
    assert isinstance(state, of.state_type), f"the state is a {type(state).__name__}, not a state_type"
    return json.dumps([meta, {k: a.tolist() for k, a in arrays.items()}], sort_keys=True)


def read_again(of: Stateful, state: Any) -> Any:
    """The state after a restart of the server."""
    arrays: dict[str, Any] = {}
    meta = json.loads(json.dumps(packed(state, "state", arrays), allow_nan=False))
    return unpacked(meta, arrays, of.state_type)


def numbers_in(state: Any) -> int:
    """How many values a state holds, those of its arrays too."""
    arrays: dict[str, Any] = {}
    plain = packed(state, "state", arrays)
    return _leaves(plain) + sum(int(array.size) for array in arrays.values())


def _leaves(plain: Any) -> int:
    if isinstance(plain, dict | list):
        return sum(map(_leaves, plain.values() if isinstance(plain, dict) else plain))
    return 1
