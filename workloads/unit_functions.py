"""What functions and methods of tensors do to the units of their input: rules like those of the layers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from anabranch.workloads.unit_layers import Rule, flattened, over_others, unit_axes_apart
from anabranch.workloads.unit_values import Many, Number, Shape, Slot, TracedCall, Value, values_in

ACTIVATIONS = """
relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish sigmoid logsigmoid tanh hardtanh
hardswish hardsigmoid softplus softsign tanhshrink dropout dropout1d dropout2d dropout3d alpha_dropout
"""
ELEMENTWISE = """
exp log log1p sqrt rsqrt square abs neg sin cos erf clamp clamp_min clamp_max clip pow add sub subtract mul
multiply div true_divide add_ sub_ mul_ div_ contiguous clone detach float double half bfloat16 to type
"""
ARITHMETIC = "add sub mul truediv floordiv mod pow neg iadd isub imul itruediv"
REDUCTIONS = "mean sum amax amin prod logsumexp"


def _elementwise(call: TracedCall) -> Any:
    """Of one tensor and numbers, in any order. Two tensors: a residual width, which is not cut."""
    found = list(values_in((call.args, call.kwargs)))
    if not found:
        return Number()
    return found[0] if len(found) == 1 and any(x is found[0] for x in call.args) else None


def _shapely(call: TracedCall) -> Any:
    """Views of a known kind: (count, everything else)."""
    x, shape = call.only_value(), call.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    by_count = len(shape) == 2 and isinstance(shape[0], Number) and shape[0].batch and shape[1] == -1
    return flattened(x) if x is not None and x.batched and by_count else None


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
    return Number() if isinstance(dim, int) and over_others(x, [dim]) else None


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
    """Whole numbers take an axis away, slices keep it; the units' axis must be taken as it is."""
    parts = index if isinstance(index, tuple) else (index,)
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
    return Value(slots, None if x.rank is None else x.rank - len(dims), x.raw, batched)


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
    place = dim % (x.rank + 1)
    slots = {axis - (axis + x.rank < place): slot for axis, slot in x.slots.items()}
    return Value(slots, x.rank + 1, x.raw, x.batched and place > 0)


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
    operator.getitem: _item,
    getattr: _attribute,
}
