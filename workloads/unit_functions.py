"""What functions and methods of tensors do to the units of their input: rules like those of the layers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from anabranch.workloads.unit_layers import Rule, dealt, flattened, over_others, unit_axes_apart
from anabranch.workloads.unit_values import Many, Number, Shape, Slot, TracedCall, Value, values_in

ACTIVATIONS = """
relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish sigmoid logsigmoid tanh hardtanh
hardswish hardsigmoid softplus softsign tanhshrink dropout dropout1d dropout2d dropout3d alpha_dropout
"""
ELEMENTWISE = """
exp log log1p sqrt rsqrt square abs neg sin cos erf clamp clamp_min clamp_max clip pow add sub subtract div
true_divide add_ sub_ div_ contiguous clone detach float double half bfloat16 to type
"""
PRODUCTS = "mul multiply mul_ expand_as"
ARITHMETIC = "add sub truediv floordiv mod pow neg iadd isub itruediv"
REDUCTIONS = "mean sum amax amin prod logsumexp"


def _elementwise(call: TracedCall) -> Any:
    """Of one tensor and numbers, in any order, or with a tensor that no layer owns, such as a bias.

    Two layers' tensors are a residual width, which is not cut.
    """
    found = list(values_in((call.args, call.kwargs)))
    if not found:
        return Number()
    if len(found) == 2 and any(x.bare for x in found):
        return _product(call)
    return found[0] if len(found) == 1 and any(x is found[0] for x in call.args) else None


def _product(call: TracedCall) -> Any:
    """Two values of one width, such as a gate and what it lets through: their units are one choice."""
    found = list(values_in((call.args, call.kwargs)))
    if len(found) != 2:
        return _elementwise(call)
    a, b = found
    if not all(any(x is y for y in call.args) for x in found):
        return None
    slots = {}
    for axis in sorted(a.slots.keys() | b.slots.keys()):
        one, two = a.slots.get(axis), b.slots.get(axis)
        slot = _joined(one, two) if one and two else (one and b.bare and one) or (two and a.bare and two)
        if not slot:
            return None
        slot.variable.shared = True
        slots[axis] = slot
    ranks = a.rank, b.rank
    known = None if None in ranks else max(rank or 0 for rank in ranks)
    return Value(slots, known, a.raw and b.raw, _counts_examples(a, b), a.bare and b.bare)


def _joined(one: Slot, two: Slot) -> Slot | None:
    """The units of both as one choice; an axis of length 1 is repeated along the other."""
    if one.single or two.single:
        return two if one.single else one
    if None in (one.outer, one.inner) or (one.size, one.outer, one.inner) != (two.size, two.outer, two.inner):
        return None
    one.variable.join(two.variable)
    return one


def _counts_examples(a: Value, b: Value) -> bool:
    """Whether axis 0 of their product counts the examples: that of the value with more axes does."""
    if a.bare != b.bare:
        layer, bare = (b, a) if a.bare else (a, b)
        return layer.batched and (bare.rank or 0) <= (layer.rank or 1)
    if a.rank == b.rank and a.rank is not None:
        return a.batched or b.batched
    return a.batched and b.batched


def _shapely(call: TracedCall) -> Any:
    """Views of a known kind: (count, everything else), (count, units, 1, 1); of bare ones (1, units, 1)."""
    x, shape = call.args[0] if call.args else None, call.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    by_count = len(shape) > 1 and isinstance(shape[0], Number) and shape[0].batch
    if isinstance(x, Value) and x.bare and sorted(shape, key=str) == [-1, *[1] * (len(shape) - 1)]:
        slots = {shape.index(-1) - len(shape): slot for slot in x.slots.values()}
        return Value(slots, len(shape), bare=True) if len(x.slots) == 1 else None
    if not isinstance(x, Value) or not x.batched or not by_count:
        return None
    if isinstance(shape[1], Number) and shape[1].units is not None:
        return _units_apart(x, shape[1].units.slots[-1], shape[2:])
    return flattened(x) if shape[1:] == (-1,) else None


def _units_apart(x: Value, units: Slot, ones: tuple[Any, ...]) -> Value | None:
    """As many values as examples times units: all other axes of x are of length 1, as are the view's."""
    if len(x.slots) != 1 or any(type(length) is not int or length != 1 for length in ones):
        return None
    (slot,) = x.slots.values()
    if slot.single or units.single:
        return None  # one unit is not so many, and its axes are not of length 1 then
    return Value({-1 - len(ones): slot}, 2 + len(ones), batched=True) if _joined(slot, units) else None


def _flatten(call: TracedCall) -> Value | None:
    x = call.only_value()
    dims = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1)
    return flattened(x) if x is not None and dims == (1, -1) else None


def _size(call: TracedCall) -> Any:
    x, dim = call.only_value(), call.argument(1, "dim")
    if x is None:
        return None
    return Shape(x) if dim is None else _length(x, dim)


def _length(x: Value, dim: Any) -> Number | None:
    if dim == 0 and x.batched:
        return Number(batch=True)
    if not isinstance(dim, int):
        return None
    if (axis := x.axis(dim)) in x.slots and axis is not None:
        return Number(units=Value({-1: x.slots[axis]}))
    return Number() if over_others(x, [dim]) else None


def _attribute(call: TracedCall) -> Any:
    x, name = call.args[0], call.args[1]
    if not isinstance(x, Value):
        return None
    return Shape(x) if name == "shape" else Number() if name in ("ndim", "dtype", "device") else None


def _item(call: TracedCall) -> Any:
    found, index = call.args[0], call.args[1]
    if isinstance(found, Shape):
        return _length(found.of, index)
    if isinstance(found, Many):
        return _one_of(found, index)
    return _sliced(found, index) if isinstance(found, Value) else None


def _one_of(found: Many, index: Any) -> Any:
    if not isinstance(index, int) or not -len(found.items) <= index < len(found.items):
        return None
    index %= len(found.items)
    if index in found.guarded:
        found.guarded[index].locked = True
    return found.items[index]


def _sliced(x: Value, index: Any) -> Value | None:
    """Numbers take an axis away, slices keep it, None adds one; the units' axis must be taken as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    for place in (place for place, p in enumerate(parts) if p is None):
        if x.rank is None:
            return None
        x = _with_axis(x, place)
    parts = tuple(slice(None) if p is None else p for p in parts)
    if not all(isinstance(p, slice) or type(p) is int for p in parts) or list(values_in(parts)):
        return None
    cut = [dim for dim, p in enumerate(parts) if p != slice(None)]
    if not over_others(x, cut):
        return None
    gone = [dim for dim in cut if type(parts[dim]) is int]
    return _without(x, gone, batched=x.batched and 0 not in cut)


def _without(x: Value, dims: list[int], batched: bool) -> Value:
    """The value less these axes."""
    axes = [axis for dim in dims if (axis := x.axis(dim)) is not None]
    slots = {a + sum(axis > a for axis in axes): slot for a, slot in x.slots.items()}
    return Value(slots, None if x.rank is None else x.rank - len(dims), x.raw, batched, x.bare)


def _reduce(call: TracedCall) -> Value | None:
    x, dims = call.only_value(), call.argument(1, "dim")
    if x is None or dims is None:
        return None
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not over_others(x, dims):
        return None
    if call.argument(2, "keepdim", False):
        return x
    first = any(dim == 0 or x.axis(dim) == -(x.rank or 0) for dim in dims)
    return _without(x, dims, x.batched and not first)


def _softmax(call: TracedCall) -> Value | None:
    x, dim = call.only_value(), call.argument(1, "dim")
    return x if x is not None and isinstance(dim, int) and over_others(x, [dim]) else None


def _transpose(call: TracedCall) -> Value | None:
    x = call.only_value()
    pair = call.argument(1, "dim0"), call.argument(2, "dim1")
    axes = [x.axis(dim) for dim in pair if isinstance(dim, int)] if x is not None else []
    if x is None or len(axes) != 2 or None in axes:
        return None
    swapped = {axes[0]: axes[1], axes[1]: axes[0]}
    slots = {swapped.get(axis) or axis: slot for axis, slot in x.slots.items()}
    first = x.rank is None or -x.rank in axes
    return Value(slots, x.rank, x.raw, x.batched and not first)


def _permute(call: TracedCall) -> Value | None:
    x, order = call.only_value(), call.args[1:]
    if len(order) == 1 and isinstance(order[0], tuple | list):
        order = tuple(order[0])
    if x is None or len(order) != x.rank or not all(isinstance(dim, int) for dim in order):
        return None
    places = [dim % x.rank for dim in order]
    slots = {places.index(axis + x.rank) - x.rank: slot for axis, slot in x.slots.items()}
    return Value(slots, x.rank, x.raw, x.batched and places[0] == 0)


def _squeeze(call: TracedCall) -> Value | None:
    x, dim = call.only_value(), call.argument(1, "dim")
    if x is None or x.rank is None or not isinstance(dim, int) or not over_others(x, [dim]):
        return None
    return _without(x, [dim], x.batched and dim % x.rank != 0)


def _unsqueeze(call: TracedCall) -> Value | None:
    x, dim = call.only_value(), call.argument(1, "dim")
    if x is None or x.rank is None or not isinstance(dim, int):
        return None
    return _with_axis(x, dim % (x.rank + 1))


def _with_axis(x: Value, place: int) -> Value:
    """A value of known rank with one more axis, of length 1, before the axis at `place`."""
    rank = x.rank or 0
    slots = {axis - (axis + rank < place): slot for axis, slot in x.slots.items()}
    return Value(slots, rank + 1, x.raw, x.batched and place > 0, x.bare)


def _chunk(call: TracedCall) -> Many | None:
    """Runs of one axis, such as a gate and what it lets through, made by one layer."""
    x, parts, dim = call.only_value(), call.argument(1, "chunks"), call.argument(2, "dim", 0)
    if x is None or type(parts) is not int or parts < 1 or not isinstance(dim, int):
        return None
    found = dealt(x, dim, parts)
    return None if found is None else Many((found,) * parts)


def _glu(call: TracedCall) -> Value | None:
    x, dim = call.only_value(), call.argument(1, "dim", -1)
    return dealt(x, dim, 2) if x is not None and isinstance(dim, int) else None


def _concatenate(call: TracedCall) -> Value | None:
    """Two directions of one layer, side by side, are its units twice; all else is a residual width."""
    parts, dim = call.args[0] if call.args else (), call.argument(1, "dim", 0)
    if not isinstance(parts, tuple | list) or not parts or not all(isinstance(p, Value) for p in parts):
        return None
    axis, slots = parts[0].axis(dim), [slot for p in parts for slot in p.slots.values()]
    alone = all(set(p.slots) == {axis} and p.rank == parts[0].rank for p in parts)
    if not alone or any(s.inner != 1 or not s.outer or s.variable is not slots[0].variable for s in slots):
        return None
    both = Slot(slots[0].variable, sum(s.outer or 0 for s in slots))
    return Value(
        {axis: both} if axis is not None else {}, parts[0].rank, batched=all(p.batched for p in parts)
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys((ACTIVATIONS + ELEMENTWISE).split(), _elementwise),
    **dict.fromkeys(PRODUCTS.split(), _product),
    **dict.fromkeys(REDUCTIONS.split(), _reduce),
    **dict.fromkeys(("view", "reshape"), _shapely),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("cat", "concat"), _concatenate),
    **{
        f"{kind}_pool{axes}d": unit_axes_apart(axes)
        for kind in ("max", "avg", "adaptive_max", "adaptive_avg")
        for axes in (1, 2, 3)
    },
    "flatten": _flatten,
    "permute": _permute,
    "chunk": _chunk,
    "glu": _glu,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "size": _size,
    "dim": lambda call: Number() if call.only_value() is not None else None,
}

FUNCTIONS: dict[Callable[..., Any], Rule] = {
    **{
        getattr(home, name): rule
        for home in (torch, functional)
        for name, rule in RULES.items()
        if name != "size" and callable(getattr(home, name, None))
    },
    **{getattr(operator, name): _elementwise for name in ARITHMETIC.split()},
    **dict.fromkeys((operator.mul, operator.imul), _product),
    operator.getitem: _item,
    getattr: _attribute,
}
