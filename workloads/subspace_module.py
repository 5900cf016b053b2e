"""The torch module of `Subspace`: its parameters are the numbers, its forward pass that of w_0 + U a."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.workloads.subspace import BASE, Hashing, coordinate_words, dealt

KINDS = (torch.float16, torch.float32, torch.float64)
NUMBERS = "numbers"  # what the parameter of all tensors, or the first part of each one's, is called


class SubspaceModule(nn.Module):
    """See `workloads/subspace.py`; `base` is taken over.

    State dict: the numbers, the tensors that are trained as they are, and a digest of all that is fixed,
    which a device compares with its own before it trains.
    """

    def __init__(self, base: nn.Module, dimension: int, seed: int, layers: str, name: str) -> None:
        super().__init__()
        self._name = name
        self._base = [base]  # in a list: no module of ours, so that its tensors stay out of the state dict
        trained = _trained(base, name)
        shared = [n for n, p in trained.items() if layers == "all" or p.ndim > 1]
        _check(base, name, dimension, sum(trained[n].numel() for n in shared), len(shared), layers)
        first = next(iter(trained.values())).dtype  # the kind in which x comes, as without a subspace
        kind = torch.float64 if first == torch.float64 else torch.float32
        self._digest = _digest(base, dimension, seed, layers)
        self.register_buffer(BASE, torch.from_numpy(self._digest.copy()))
        self._rows: dict[str, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for number, hashing, tensors in _hashings(trained, shared, dimension, seed, layers):
            # Of two dimensions: codecs leave those of one, mostly biases, nearly as they are.
            self.register_parameter(number, nn.Parameter(torch.zeros(1, hashing.dimension, dtype=kind)))
            begin = 0
            for tensor in tensors:
                rows = slice(begin, begin := begin + trained[tensor].numel())
                index, scale = torch.from_numpy(hashing.index[rows]), torch.from_numpy(hashing.scale[rows])
                self._rows[tensor] = number, index, scale
        self._plain = {n: n.replace(".", "/") for n in trained if n not in self._rows}
        for tensor, own in self._plain.items():
            self.register_parameter(own, nn.Parameter(trained[tensor].detach().clone()))
        base.requires_grad_(False)

    @property
    def base(self) -> nn.Module:
        """The wrapped App's model, at its start."""
        return self._base[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base's, at w_0 + U a."""
        return functional_call(self._base[0], self.weights(), args, kwargs)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the numbers move, as they are now."""
        starts, own = dict(self._base[0].named_parameters()), dict(self.named_parameters())
        found: dict[str, torch.Tensor] = {name: own[number] for name, number in self._plain.items()}
        for name, (number, index, scale) in self._rows.items():
            moved = own[number][0].index_select(0, index) * scale
            found[name] = starts[name] + moved.view(starts[name].shape)
        return found

    def check(self) -> None:
        """Raises `ManifestMismatch` unless the run is of this device's start and U."""
        if not np.array_equal(self.get_buffer(BASE).cpu().numpy(), self._digest):
            raise ManifestMismatch(
                f"{self._name}: the run's numbers are of another start, dimension, seed or layers than this "
                "App's: start the run and its devices with the same App, and the same version of torch"
            )

    def take(self, tensors: Mapping[str, Any]) -> None:
        """Loads a run's tensors, numpy arrays by name."""
        self.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})

    def merged(self) -> dict[str, Any]:
        """The base's state dict with the weights as they are now, numpy arrays by name."""
        base, state = self._base[0], dict(self._base[0].state_dict())
        first = {id(parameter): name for name, parameter in base.named_parameters()}
        with torch.no_grad():
            weights = self.weights()
        for name, parameter in base.named_parameters(remove_duplicate=False):  # shared ones, by every name
            state[name] = weights.get(first[id(parameter)], parameter)
        return {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}

    def train(self, mode: bool = True) -> SubspaceModule:
        """The base's layers too, such as dropout."""
        super().train(mode)
        self._base[0].train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SubspaceModule:
        """To another device, with all that is fixed."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._base[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._rows = {name: (n, fn(index), fn(scale)) for name, (n, index, scale) in self._rows.items()}
        return self


def _trained(base: nn.Module, name: str) -> dict[str, torch.Tensor]:
    trained: dict[str, torch.Tensor] = {n: p for n, p in base.named_parameters() if p.requires_grad}
    for own, tensor in trained.items():
        if tensor.dtype not in KINDS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AppError(f"{name}: tensor {own!r} is {kind}: keep weights in float32")
    return trained


def _check(base: nn.Module, name: str, dimension: int, size: int, tensors: int, layers: str) -> None:
    changed = set(base.state_dict()) - {n for n, _ in base.named_parameters(remove_duplicate=False)}
    if changed:
        named = ", ".join(sorted(changed)[:3])
        raise AppError(
            f"{name}: the model has buffers, which training may change ({named}), and no number stands "
            "for them: use layers without running statistics, such as GroupNorm, and "
            "register_buffer(..., persistent=False) for what stays as it is"
        )
    least = tensors if layers == "each" else 1
    if not least <= dimension <= size:
        raise AppError(f"{name}: dimension must be from {least} to {size} for this model, not {dimension}")


def _hashings(
    trained: Mapping[str, torch.Tensor], shared: list[str], dimension: int, seed: int, layers: str
) -> list[tuple[str, Hashing, list[str]]]:
    """The name of each parameter of numbers, its U, and the tensors that read it, in their order."""
    sizes = [trained[name].numel() for name in shared]
    words = coordinate_words(seed, sum(sizes))
    if layers == "all":
        return [(NUMBERS, Hashing.drawn(words, dimension), shared)]
    ends = np.cumsum(sizes)[:-1]
    parts = zip(shared, np.split(words, ends), dealt(dimension, sizes), strict=True)
    return [(f"{NUMBERS}/{name.replace('.', '/')}", Hashing.drawn(w, k), [name]) for name, w, k in parts]


def _digest(base: nn.Module, dimension: int, seed: int, layers: str) -> Any:
    """SHA-256 of all that devices must have alike, uint8 (32,)."""
    found = hashlib.sha256(f"{dimension} {seed} {layers}".encode())
    for name, tensor in base.named_parameters():
        array = tensor.detach().cpu().numpy()
        found.update(f"{name} {tensor.requires_grad} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return np.frombuffer(found.digest(), np.uint8)
