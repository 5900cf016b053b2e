"""What each layer of torch.nn does to the units of its input, and which units it makes.

A rule takes a `TracedCall` and returns the result's value, or None: not understood, which locks the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from anabranch.core.errors import AppError
from anabranch.workloads.unit_attention import multi_head, transformer
from anabranch.workloads.unit_values import Many, Slot, TracedCall, Value, lock

Rule = Callable[[TracedCall], Any]
Places = Iterable[tuple[str, int]]


def _consume(call: TracedCall, x: Value, axis: int, length: int, places: Places) -> None:
    """The units of this axis of x run through the layer's tensors at `places`."""
    if (slot := x.slots.get(axis)) is None:
        return
    if (known := slot.of_length(length)) is None:
        slot.variable.locked = True
        return
    for tensor, along in places:
        if getattr(call.module, tensor, None) is not None:
            known.variable.add(call.name(tensor), along, outer=known.outer or 1, inner=known.inner or 1)


def _produce(call: TracedCall, size: int, places: Places) -> Slot:
    """New units, made by the layer's tensors at `places`."""
    variable = call.start(call.path, size)
    for tensor, along in places:
        if getattr(call.module, tensor, None) is not None:
            variable.add(call.name(tensor), along)
    return Slot(variable)


def _others(x: Value, axis: int) -> dict[int, Slot]:
    return {a: slot for a, slot in x.slots.items() if a != axis}


def _linear(call: TracedCall) -> Value | None:
    if (x := call.only_value()) is None:
        return None
    _consume(call, x, -1, call.module.in_features, [("weight", 1)])
    made = _produce(call, call.module.out_features, [("weight", 0), ("bias", 0)])
    return Value({**_others(x, -1), -1: made}, x.rank, batched=x.batched)


def _convolution(call: TracedCall) -> Value | None:
    """The first convolution, the stem, keeps all its output channels."""
    x, conv = call.only_value(), call.module
    rank = len(conv.kernel_size) + 2
    if x is None or x.rank not in (None, rank):
        return None
    lock(Value(_others(x, 1 - rank)))
    if conv.groups > 1:
        return _depthwise(call, x, rank)
    inputs, outputs = (0, 1) if conv.transposed else (1, 0)
    _consume(call, x, 1 - rank, conv.in_channels, [("weight", inputs)])
    made = {} if x.raw else {1 - rank: _produce(call, conv.out_channels, [("weight", outputs), ("bias", 0)])}
    return Value(made, rank, batched=x.batched)


def _depthwise(call: TracedCall, x: Value, rank: int) -> Value | None:
    conv, slot = call.module, x.slots.get(1 - rank)
    if not conv.groups == conv.in_channels == conv.out_channels:
        return None
    known = slot.of_length(conv.in_channels) if slot else None
    _consume(call, x, 1 - rank, conv.in_channels, [("weight", 0), ("bias", 0)])
    return Value({1 - rank: known} if known else {}, rank, raw=x.raw, batched=x.batched)


def _channelwise(lengths: str, rank: int | None = None) -> Rule:
    """Norms and the like with one entry for each channel; `lengths`: the attribute with their number."""

    def rule(call: TracedCall) -> Value | None:
        if (x := call.only_value()) is None:
            return None
        length, found = getattr(call.module, lengths), x.rank or rank
        if found is None and set(x.slots) - {-1}:
            return None
        axis = -1 if found is None else 1 - found
        if found is None and axis in x.slots and x.slots[axis].of_length(length) is not None:
            if x.slots[axis].variable.shared:
                return None  # only what a layer alone has made is worth a question
            raise AppError(
                f"{type(call.module).__name__} {call.path!r} is over the {length} units before it, or over a "
                f"sequence of {length}: the model does not say. Begin it with nn.Flatten() where examples "
                "have one axis, or write units(self, model) in the App"
            )
        if (slot := x.slots.get(axis)) is None:
            return Value(x.slots, found, x.raw, x.batched)
        known = slot.of_length(length)
        if known is None or not _keeps_norm_groups(call.module, known, length):
            return None
        _consume(
            call, x, axis, length, [(name, 0) for name in ("weight", "bias", "running_mean", "running_var")]
        )
        return Value({**x.slots, axis: known}, found, x.raw, x.batched)

    return rule


def _keeps_norm_groups(module: nn.Module, slot: Slot, length: int) -> bool:
    """Without tensors the smaller size cannot be told; groups of a group norm stay together.

    One group is all channels: what is left of them has another mean, so it stays whole.
    """
    bare = not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    if isinstance(module, nn.GroupNorm):
        width = length // module.num_groups
        slot.variable.keep_together(width // math.gcd(width, slot.inner or 1))
        return not bare and not slot.variable.locked
    # A batch norm without tensors works in any size.
    return not (bare and isinstance(module, nn.modules.instancenorm._InstanceNorm))


def _last_axis_norm(call: TracedCall) -> Value | None:
    """What is left of an axis has another mean and mean square than all of it: it stays whole."""
    if (x := call.only_value()) is None:
        return None
    lock(Value({a: slot for a, slot in x.slots.items() if a >= -len(call.module.normalized_shape)}))
    return x


def _prelu(call: TracedCall) -> Any:
    return same(call) if call.module.num_parameters == 1 else _channelwise("num_parameters")(call)


def _recurrent(call: TracedCall) -> Many | None:
    """One group for all layers and directions; the gates' blocks are `outer`."""
    x, rnn = call.only_value(), call.module
    if x is None or rnn.proj_size:
        return None
    lock(Value(_others(x, -1)))
    gates = {"LSTM": 4, "GRU": 3}.get(rnn.mode, 1)
    directions = ("", "_reverse") if rnn.bidirectional else ("",)
    _consume(call, x, -1, rnn.input_size, [(f"weight_ih_l0{d}", 1) for d in directions])
    units = call.start(call.path or "rnn", rnn.hidden_size)
    for end in (f"_l{layer}{d}" for layer in range(rnn.num_layers) for d in directions):
        for kind in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if rnn.bias else ())):
            units.add(call.name(kind + end), 0, outer=gates)
        units.add(call.name("weight_hh" + end), 1)
        if not end.startswith("_l0"):
            units.add(call.name("weight_ih" + end), 1, outer=len(directions))
    batched = x.batched and rnn.batch_first
    output = Value({-1: Slot(units, outer=len(directions))}, 3, batched=batched)
    state = Value({-1: Slot(units)}, 3)
    return Many((output, Many((state, state)) if rnn.mode == "LSTM" else state))


def _embedding(call: TracedCall) -> Value | None:
    x = call.only_value()
    if x is None or x.slots:
        return None
    return Value({}, x.rank and x.rank + 1, batched=x.batched)


def same(call: TracedCall) -> Value | None:
    """Elementwise: each value of the result comes from the one in its place."""
    return call.only_value()


def unit_axes_apart(axes: int) -> Rule:
    """Pooling and padding over the last `axes` axes, which must not be the units'."""

    def rule(call: TracedCall) -> Value | None:
        x = call.only_value()
        two = call.kwargs.get("return_indices", getattr(call.module, "return_indices", False))
        return None if x is None or two or any(axis >= -axes for axis in x.slots) else x

    return rule


def _flatten(call: TracedCall) -> Value | None:
    layer = call.module
    x = call.only_value()
    whole = (layer.start_dim, layer.end_dim) == (1, -1)
    return flattened(x) if x is not None and whole else None


def flattened(x: Value) -> Value | None:
    """All axes but the first as one; how often the units are repeated in it, the next layer tells."""
    if not x.slots:
        return Value({}, 2, x.raw, x.batched)
    (axis, slot), more = next(iter(x.slots.items())), len(x.slots) > 1
    if more or (x.rank is None and axis != -1) or (x.rank is not None and axis <= -x.rank):
        return None
    before = x.rank is None or axis != 1 - x.rank
    found = Slot(slot.variable, None if before else slot.outer, slot.inner if axis == -1 else None)
    return Value({-1: found}, 2, x.raw, x.batched)


def dealt(x: Value, dim: int, parts: int) -> Value | None:
    """A run of this axis, which is cut into `parts` of them: unit u is the u-th place of each run."""
    axis = x.axis(dim)
    if axis is None or (slot := x.slots.get(axis)) is None:
        return None
    if (slot.outer, slot.inner) != (1, 1):
        return None
    slot.variable.deal(parts)
    slot.of.root.shared = True  # `variable` would lock what was dealt
    return Value({**_others(x, axis), axis: Slot(slot.of)}, x.rank, batched=x.batched)


def _glu(call: TracedCall) -> Value | None:
    x = call.only_value()
    return dealt(x, call.module.dim, 2) if x is not None else None


def _softmax(call: TracedCall) -> Value | None:
    x, dim = call.only_value(), call.module.dim
    return x if x is not None and dim is not None and over_others(x, [dim]) else None


def over_others(x: Value, dims: Iterable[int]) -> bool:
    """Whether these axes are not the units'."""
    found = [x.axis(dim) for dim in dims]
    return not x.slots or all(axis is not None and axis not in x.slots for axis in found)


LAYERS: dict[type, Rule] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    nn.BatchNorm1d: _channelwise("num_features"),
    nn.BatchNorm2d: _channelwise("num_features", 4),
    nn.BatchNorm3d: _channelwise("num_features", 5),
    nn.InstanceNorm1d: _channelwise("num_features", 3),
    nn.InstanceNorm2d: _channelwise("num_features", 4),
    nn.InstanceNorm3d: _channelwise("num_features", 5),
    nn.GroupNorm: _channelwise("num_channels"),
    nn.LayerNorm: _last_axis_norm,
    nn.RMSNorm: _last_axis_norm,
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent),
    nn.Embedding: _embedding,
    nn.MultiheadAttention: multi_head,
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerEncoder), transformer),
    **dict.fromkeys((nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.Transformer), transformer),
    nn.Flatten: _flatten,
    nn.GLU: _glu,
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), _softmax),
    **{
        getattr(nn, f"{kind}{axes}d"): unit_axes_apart(axes)
        for kind in ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "ConstantPad", "ZeroPad")
        for axes in (1, 2, 3)
    },
    **dict.fromkeys((nn.ReflectionPad2d, nn.ReplicationPad2d), unit_axes_apart(2)),
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), same),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU), same),
    **dict.fromkeys((nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish), same),
    **dict.fromkeys((nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.AlphaDropout), same),
}
