"""A copy of a torch module in which some tensors are smaller, and which computes with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from anabranch.workloads.small_attention import SmallAttention

Shape = tuple[int, ...]


def resized(module: nn.Module, shapes: Mapping[str, Shape]) -> nn.Module:
    """A copy of `module` with tensors of these shapes, by their names in the state dict, on the same device.

    A tensor that was cut holds zeros. The layers of `ADAPT` and multi-head attention work in their new
    size; what other modules make of smaller tensors is theirs.
    """
    found: nn.Module = copy.deepcopy(module, _cut_tensors(module, shapes))
    for path, part in list(found.named_modules()):
        whole = module.get_submodule(path)
        if cut_of(whole, shapes, path):
            found = _adapted(found, path, part, whole)
    for part in found.modules():
        if isinstance(part, nn.TransformerEncoder) and any(
            isinstance(m, SmallAttention) for m in part.modules()
        ):
            part.use_nested_tensor = False  # its fast path reads whole heads
    return found


def _cut_tensors(module: nn.Module, shapes: Mapping[str, Shape]) -> dict[int, Any]:
    """For `deepcopy`: what takes the place of each tensor, so that no whole one is copied first."""
    found: dict[int, Any] = {}
    for name, whole in module.state_dict(keep_vars=True).items():
        same, data = tuple(whole.shape) == shapes[name], whole.detach()
        data = data.clone() if same else data.new_zeros(shapes[name])
        if isinstance(whole, nn.Parameter):
            data = nn.Parameter(data, whole.requires_grad)
        found[id(whole)] = data
    return found


def cut_of(whole: nn.Module, shapes: Mapping[str, Shape], path: str) -> set[str]:
    """The tensors of the layer itself that are smaller (or of the projection that an attention owns)."""
    dot = f"{path}." if path else ""
    deep = isinstance(whole, nn.MultiheadAttention)
    own = (*whole.named_parameters(recurse=deep), *whole.named_buffers(recurse=deep))
    return {dot + name for name, t in own if tuple(t.shape) != shapes.get(dot + name, tuple(t.shape))}


def _adapted(root: nn.Module, path: str, part: nn.Module, whole: nn.Module) -> nn.Module:
    if type(part) is nn.MultiheadAttention:
        small = SmallAttention(part)
        if not path:
            return small
        root.set_submodule(path, small)
        return root
    if path.endswith("out_proj") and isinstance(_parent(root, path), SmallAttention):
        return root  # it is set already
    if type(part) in ADAPT:
        ADAPT[type(part)](part, whole)
    return root


def _parent(root: nn.Module, path: str) -> nn.Module:
    return root.get_submodule(path.rpartition(".")[0])


Adapt = Callable[[Any, Any], None]


def _linear(part: nn.Linear, _: nn.Linear) -> None:
    part.out_features, part.in_features = part.weight.shape


def _convolution(part: Any, whole: Any) -> None:
    """`groups` > 1: each group keeps its width."""
    first, second = part.weight.shape[:2]
    part.groups = first // (whole.weight.shape[0] // whole.groups) if whole.groups > 1 else 1
    second *= part.groups
    part.in_channels, part.out_channels = (first, second) if whole.transposed else (second, first)


def _channels(part: Any, _: Any) -> None:
    part.num_features = _length(part)


def _group_norm(part: nn.GroupNorm, whole: nn.GroupNorm) -> None:
    part.num_channels = _length(part)
    if whole.num_groups > 1:
        part.num_groups = part.num_channels // (whole.num_channels // whole.num_groups)


def _last_axis_norm(part: Any, _: Any) -> None:
    part.normalized_shape = tuple(part.weight.shape)


def _prelu(part: nn.PReLU, _: nn.PReLU) -> None:
    part.num_parameters = part.weight.shape[0]


def _recurrent(part: nn.RNNBase, _: nn.RNNBase) -> None:
    tensors = dict(part.named_parameters(recurse=False))
    part.hidden_size = tensors["weight_hh_l0"].shape[1]
    part.input_size = tensors["weight_ih_l0"].shape[1]
    part.flatten_parameters()


def _embedding(part: nn.Embedding, _: nn.Embedding) -> None:
    part.num_embeddings, part.embedding_dim = part.weight.shape


def _length(part: nn.Module) -> int:
    """Of the first tensor that has a place for each channel."""
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return next(int(t.shape[0]) for t in tensors if t.dim() == 1)


ADAPT: dict[type, Adapt] = {
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _channels),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _channels),
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _last_axis_norm),
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent),
    nn.Embedding: _embedding,
}
