"""Units: what a sub-model keeps or leaves out, such as hidden neurons, channels or attention heads.

A unit is a set of parallel slices through several tensors: a hidden neuron is a row of one weight matrix, an
entry of its bias and a column of the next matrix. A `UnitGroup` is a layer's units; a `Member` says where
they lie in one tensor. Along the member's axis, of length outer * units * inner, unit u has the places

    (o * units + u) * inner + i        for o < outer, i < inner

so that LSTM gates (outer = 4), attention heads (inner = their width) and the columns of a linear layer
behind a flattened picture (inner = height * width) are all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.core.errors import ConfigError
from anabranch.core.shares import floor_of

UNITS_MAX, MEMBERS_MAX, GROUPS_MAX = 1 << 20, 1 << 10, 1 << 12


@dataclass(frozen=True)
class Member:
    """Where the units of a group lie in one tensor: see the module."""

    tensor: str
    axis: int
    outer: int = 1
    inner: int = 1


def layer_text(name: str) -> str:
    """What a layer is called: one without a name of its own has its place for it, the model's root none."""
    if not name:
        return "the model"
    return f"layer {name}" if name.rpartition(".")[2].isdecimal() else name


@dataclass(frozen=True)
class UnitGroup:
    """`size` units of one layer and all the tensors that they run through."""

    name: str
    size: int
    members: tuple[Member, ...]

    def to_json(self) -> list[Any]:
        """[name, size, [[tensor, axis, outer, inner], ...]]."""
        return [self.name, self.size, [[m.tensor, m.axis, m.outer, m.inner] for m in self.members]]

    @classmethod
    def from_json(cls, data: list[Any]) -> UnitGroup:
        """The inverse of `to_json`."""
        name, size, rows = data
        members = tuple(Member(str(t), int(a), int(o), int(i)) for t, a, o, i in rows)
        return cls(str(name), int(size), members)


def check_groups(groups: tuple[UnitGroup, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ConfigError`, naming the group, unless every group fits the tensors' shapes.

    No two groups may share an axis of a tensor.
    """
    taken: dict[tuple[str, int], str] = {}
    names: set[str] = set()
    if len(groups) > GROUPS_MAX:
        raise ConfigError(f"units: {len(groups)} groups are over the cap of {GROUPS_MAX}")
    for group in groups:
        if group.name in names:
            raise ConfigError(f"units: there are two groups {group.name!r}: names must differ")
        names.add(group.name)
        if not 1 <= group.size <= UNITS_MAX or not 1 <= len(group.members) <= MEMBERS_MAX:
            raise ConfigError(
                f"units of group {group.name!r}: 1 to {UNITS_MAX} units and 1 to {MEMBERS_MAX} members "
                "are needed"
            )
        for m in group.members:
            _check_member(group, m, shapes)
            if (other := taken.setdefault((m.tensor, m.axis), group.name)) is not group.name:
                raise ConfigError(
                    f"units: groups {other!r} and {group.name!r} share axis {m.axis} of tensor {m.tensor!r}"
                )
        if len({(m.tensor, m.axis) for m in group.members}) != len(group.members):
            raise ConfigError(f"units of group {group.name!r}: an axis of a tensor is named twice")


def _check_member(group: UnitGroup, m: Member, shapes: Mapping[str, tuple[int, ...]]) -> None:
    shape = shapes.get(m.tensor)
    if shape is None:
        raise ConfigError(f"units of group {group.name!r}: there is no float tensor {m.tensor!r}")
    if not 0 <= m.axis < len(shape) or m.outer < 1 or m.inner < 1:
        raise ConfigError(f"units of group {group.name!r}: tensor {m.tensor!r} of shape {shape} has no {m}")
    if shape[m.axis] != m.outer * group.size * m.inner:
        raise ConfigError(
            f"units of group {group.name!r}: axis {m.axis} of tensor {m.tensor!r} is {shape[m.axis]} long, "
            f"not {m.outer} x {group.size} x {m.inner}"
        )


def units_at_most(size: int, width_max: float) -> int:
    """How many of a group's units are no more than that share of them; 0 where one already is more.

    A group of a single unit cannot be less than it is: it is whole in every part.
    """
    return size if size == 1 else floor_of(width_max, size)


def places(member: Member, size: int, kept: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places along the member's axis of the kept units, increasing; `size` is the group's."""
    outer = np.arange(member.outer, dtype=np.int64)[:, None, None] * size
    inner = np.arange(member.inner, dtype=np.int64)
    found = (outer + np.asarray(kept, np.int64)[:, None]) * member.inner + inner
    return found.reshape(-1)
