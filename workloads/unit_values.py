"""What is known of a value on its way through a module: which of its axes hold the units of which layer.

Axes are counted from the end (-1 is the last): whatever comes before them, a linear layer's output has its
units on the last axis, and a convolution's output on the axis before the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.model.units import MEMBERS_MAX, Member, UnitGroup

NUMPY = {"dim": "axis", "keepdim": "keepdims"}  # torch takes these names, too


@dataclass(eq=False)
class Variable:
    """The units that one layer produces, and the tensors they were seen to run through.

    `locked`: something needs all of them. `block`: so many neighbours can only go together. `bare`: an axis
    of a tensor that no layer owns, such as a scale of channels; alone it is no layer's units. `shared`: they
    are in a product, or in runs of one axis, so that they are not just what the layer returned. `place`: in
    the graph's order. `into`: the variable that it was joined to.
    """

    name: str
    size: int
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    locked: bool = False
    block: int = 1
    bare: bool = False
    shared: bool = False
    place: int = 0
    into: Variable | None = None

    @property
    def root(self) -> Variable:
        """What stands for this one and all that were joined with it."""
        found = self
        while found.into is not None:
            found = found.into
        if self is not found:
            self.into = found  # the next who asks has one step to go
        return found

    def join(self, other: Variable) -> None:
        """Both are roots of one size: a unit of either is left out with the other's unit of its number."""
        if other is self:
            return
        first, second = sorted((self, other), key=lambda variable: (variable.bare, variable.place))
        for (tensor, axis), m in second.members.items():
            first.add(tensor, axis, m.outer, m.inner)
        first.keep_together(second.block)
        first.locked, first.shared = first.locked or second.locked, first.shared or second.shared
        second.into = first

    def deal(self, parts: int) -> None:
        """Of an axis that is cut into `parts` runs, a unit is the places of one number in all of them."""
        if self.size % parts or self.block > 1 or any(m.outer * m.inner > 1 for m in self.members.values()):
            self.locked = True
            return
        self.size //= parts
        self.members = {at: Member(m.tensor, m.axis, parts) for at, m in self.members.items()}

    def add(self, tensor: str, axis: int, outer: int = 1, inner: int = 1) -> None:
        """A tensor that the units run through; two different ways along one axis, or too many, lock them."""
        member = Member(tensor, axis, outer, inner)
        one_way = self.members.setdefault((tensor, axis), member) == member
        self.locked = self.locked or not one_way or len(self.members) > MEMBERS_MAX

    def keep_together(self, units: int) -> None:
        """Blocks of `units` neighbours, on top of the blocks there are; locks where that does not fit."""
        self.block = math.lcm(self.block, units)
        self.locked = self.locked or self.size % self.block != 0

    def group(self) -> UnitGroup | None:
        """The group of units, or None where none of them can be left out."""
        units = self.size // self.block
        if self.locked or self.bare or units < 2 or not self.members:
            return None
        members = (Member(m.tensor, m.axis, m.outer, m.inner * self.block) for m in self.members.values())
        return UnitGroup(self.name, units, tuple(members))


@dataclass(frozen=True)
class WholeWidth:
    """A layer whose units cannot be left out, and what needs all of them, such as a layer or a function."""

    name: str
    units: int
    because: str


@dataclass(frozen=True)
class Slot:
    """An axis of a value holds these units, repeated as a `Member` says; None: the next layer tells.

    `size`: how many units there were when the slot was made.
    """

    of: Variable
    outer: int | None = 1
    inner: int | None = 1
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.of.root.size)

    @property
    def variable(self) -> Variable:
        """The units, together with all that were joined to them.

        Whoever asks after they were dealt means another axis than the one that was cut: that locks them.
        """
        found = self.of.root
        found.locked = found.locked or found.size != self.size
        return found

    @property
    def single(self) -> bool:
        """Whether the axis is of length 1, and so is repeated for whatever it meets."""
        return (self.size, self.outer, self.inner) == (1, 1, 1)

    def of_length(self, length: int) -> Slot | None:
        """The same on an axis of this length; None where it does not fit."""
        known = self.variable.size * (self.outer or 1) * (self.inner or 1)
        if length % known or (self.outer is None and self.inner is None):
            return None
        left = length // known
        if self.outer is None:
            return Slot(self.variable, left, self.inner)
        if self.inner is None:
            return Slot(self.variable, self.outer, left)
        return self if left == 1 else None


@dataclass(frozen=True)
class Value:
    """A tensor in the graph. `rank` is None where it is not known.

    `raw`: it is the model's input, reshaped or rescaled at most. `batched`: axis 0 counts the examples.
    `bare`: it is made of tensors that no layer owns, and an axis without a slot is of length 1.
    """

    slots: Mapping[int, Slot] = field(default_factory=dict)
    rank: int | None = None
    raw: bool = False
    batched: bool = False
    bare: bool = False

    def axis(self, dim: int) -> int | None:
        """`dim` counted from the end; None where the rank that this needs is not known."""
        if dim < 0:
            return dim
        return None if self.rank is None else dim - self.rank


@dataclass(frozen=True)
class Number:
    """A size or another plain value.

    `batch`: how many examples there are. `units`: how long the last axis of this value is, which has units.
    """

    batch: bool = False
    units: Value | None = None


@dataclass(frozen=True)
class Shape:
    """`x.shape`."""

    of: Value


@dataclass(frozen=True)
class Many:
    """Several results. To take one that is in `guarded` locks that variable."""

    items: tuple[Any, ...]
    guarded: Mapping[int, Variable] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedCall:
    """One node: what is called (a module at `path`, or a function), and with which values.

    `start` makes a new variable and remembers it in the graph's order.
    """

    module: Any
    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    start: Callable[[str, int], Variable]

    def name(self, tensor: str) -> str:
        """A tensor of the module, as the state dict calls it."""
        return f"{self.path}.{tensor}" if self.path else tensor

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, self.kwargs.get(NUMPY.get(name, name), default))

    def only_value(self) -> Value | None:
        """The first argument where it is the only tensor, else None."""
        found = list(values_in((self.args, self.kwargs)))
        alone = len(found) == 1 and bool(self.args) and found[0] is self.args[0]
        return found[0] if alone else None


def values_in(found: Any) -> Iterator[Value]:
    """Every tensor in nested arguments or results."""
    if isinstance(found, Value):
        yield found
    elif isinstance(found, Shape):
        yield found.of
    elif isinstance(found, Number):
        yield from values_in(found.units)
    elif isinstance(found, Many):
        yield from values_in(found.items)
    elif isinstance(found, Mapping):
        yield from values_in(tuple(found.values()))
    elif isinstance(found, tuple | list):
        for item in found:
            yield from values_in(item)
    elif isinstance(found, slice):
        yield from values_in((found.start, found.stop, found.step))


def lock(found: Any) -> None:
    """Keeps all units of these values: what happens to them is not known, or needs them all."""
    for value in values_in(found):
        for slot in value.slots.values():
            slot.variable.locked = True
    if isinstance(found, Many):
        for variable in found.guarded.values():
            variable.locked = True
