"""Units of attention layers: heads, and the hidden units of a transformer's feed-forward parts.

The width of the model (`d_model`) is a residual width: it stays whole, and so do the layers' inputs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from anabranch.workloads.unit_values import Many, TracedCall, Value, Variable, lock, values_in

BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def multi_head(call: TracedCall) -> Many | None:
    """The heads of one layer. Who takes the attention weights, a mean over the heads, locks them."""
    inputs = list(values_in((call.args, call.kwargs)))
    by_head = call.argument(7, "average_attn_weights", True) is not True
    masked = call.argument(5, "attn_mask") is not None  # it may have a part for each head
    if not inputs or by_head or masked:
        return None
    lock((call.args, call.kwargs))
    heads = _heads(call, call.module, call.path)
    output = Value({}, inputs[0].rank, batched=inputs[0].batched and call.module.batch_first)
    return Many((output, Value()), {1: heads} if heads else {})


def transformer(call: TracedCall) -> Value | None:
    """Heads and hidden units of each block, in the order of the modules."""
    inputs = list(values_in((call.args, call.kwargs)))
    if not inputs:
        return None
    lock((call.args, call.kwargs))
    for path, block in call.module.named_modules(prefix=call.path):
        if type(block) in BLOCKS:
            for name, part in block.named_children():
                if type(part) is nn.MultiheadAttention:
                    _heads(call, part, f"{path}.{name}" if path else name)
            _hidden(call, path, block)
    batched = inputs[0].batched and _batch_first(call.module)
    return Value({}, 3, batched=batched)


def _batch_first(module: nn.Module) -> bool:
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    return all(m.batch_first for m in attentions)


def _heads(call: TracedCall, attention: Any, path: str) -> Variable | None:
    """The heads as a variable; None where the layer has keys or values of its own."""
    if attention.bias_k is not None or attention.add_zero_attn:
        return None
    width = attention.head_dim
    heads = call.start(path or "attention", attention.num_heads)
    dot = f"{path}." if path else ""
    if attention.in_proj_weight is not None:
        heads.add(f"{dot}in_proj_weight", 0, outer=3, inner=width)
    else:
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            heads.add(dot + name, 0, inner=width)
    if attention.in_proj_bias is not None:
        heads.add(f"{dot}in_proj_bias", 0, outer=3, inner=width)
    heads.add(f"{dot}out_proj.weight", 1, inner=width)
    return heads


def _hidden(call: TracedCall, path: str, block: nn.Module) -> None:
    dot = f"{path}." if path else ""
    units = call.start(f"{dot}linear1", block.get_submodule("linear1").out_features)  # type: ignore[arg-type]
    units.add(f"{dot}linear1.weight", 0)
    if getattr(block.get_submodule("linear1"), "bias", None) is not None:
        units.add(f"{dot}linear1.bias", 0)
    units.add(f"{dot}linear2.weight", 1)
