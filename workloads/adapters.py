"""Train a small part of a torch module: low-rank adapters, prompts, biases, the head. Needs torch.

    W' = W + (alpha / r) B A          LoRA, Hu et al. 2021 (arXiv 2106.09685), section 4.1

| symbol | meaning                                  | here                                         |
|--------|------------------------------------------|----------------------------------------------|
| W      | a layer's weight, (d, k), frozen         | the tensor; a convolution's as (out, in h w) |
| A      | (r, k), begins as draws from N(0, 1 / r) | `LowRank.A`                                  |
| B      | (d, r), begins as zeros: W' is W then    | `LowRank.B`                                  |
| r      | how many dimensions a change has         | `rank`                                       |
| alpha  | over r: what a change is multiplied with | `alpha`                                      |

The mean of several devices' B A is not mean(B) mean(A). With A frozen (`train="b"`) it is: FFA-LoRA (arXiv
2403.12313). With the halves in turns (`train="alternate"`) it is within a turn: RoLoRA (arXiv 2502.01755).
docs/adapters.md says what that comes to where updates are late.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import NormalDist

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.core.rng import seed_of
from anabranch.workloads.app import Array
from anabranch.workloads.arguments import positive, whole
from anabranch.workloads.frozen_tensors import is_held
from anabranch.workloads.subspace import coordinate_words

# The tensors of a layer that are matrices, and change by one of low rank.
MATRICES: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "Linear": (nn.Linear, ("weight",)),
    "Conv1d": (nn.Conv1d, ("weight",)),
    "Conv2d": (nn.Conv2d, ("weight",)),
    "Conv3d": (nn.Conv3d, ("weight",)),
    "Embedding": (nn.Embedding, ("weight",)),
    "MultiheadAttention": (
        nn.MultiheadAttention,
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
}
TARGETS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")
HALVES = ("both", "b", "alternate")
PERIOD = 4  # versions of a turn
TIED = (
    "the adapter is of one of them, and the plain model, with one tensor for both, cannot have what is "
    "merged. Leave the layer out of the targets, or untie them in model() before lora: layer.weight = "
    "torch.nn.Parameter(layer.weight.detach().clone())"
)


class LowRank(nn.Module):
    """W to W + (alpha / r) B A, as a parametrization of the tensor; see the module."""

    def __init__(
        self, weight: torch.Tensor, rank: int, alpha: float, train: str, period: int, seed: int
    ) -> None:
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        # What is trained is never of half precision: its steps would be lost.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        drawn = torch.from_numpy(normal_draws(seed, rank * columns) / math.sqrt(rank)).view(rank, columns)
        self.A = nn.Parameter(drawn.to(weight.device, dtype), requires_grad=train != "b")
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=weight.device))
        self.scale, self.period = alpha / rank, period if train == "alternate" else 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """W', in the shape and precision of W. Raises `AppError` as `check_turn` does, in training."""
        if self.training and torch.is_grad_enabled():
            self.check_turn()
        return (weight + self.scale * (self.B @ self.A).view(weight.shape)).to(weight.dtype)

    def check_turn(self) -> None:
        """Raises `AppError` where the halves alternate, and nobody has said whose turn it is."""
        if self.period and self.A.requires_grad and self.B.requires_grad:
            raise AppError(
                'adapters that alternate: nobody says whose turn it is: set submodel.name = "alternate", or '
                "call take_turn(model, self.version) in train (without gradients in train_zeroth), before it "
                "trains"
            )

    def take_turn(self, version: int) -> None:
        """Freezes a half: `period` versions long A, and B for as many after them.

        Nothing changes where the task at hand freezes one of them: it sends the other.
        """
        if is_held(self.A) or is_held(self.B):
            return
        second = bool(version // self.period % 2)
        self.A.requires_grad_(second)
        self.B.requires_grad_(not second)


def lora(
    module: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Collection[str] = TARGETS,
    train: str = "both",
    period: int = PERIOD,
    seed: int = 0,
) -> nn.Module:
    """`module` with an adapter at each matrix of its layers that `targets` names, and all else frozen.

    A target is a kind of layer (`Linear`, `Conv1d` to `Conv3d`, `Embedding`, `MultiheadAttention`, whose
    matrix is that of its projections) or a layer's path in the module, with `*` and `?`. `train`: `both`
    halves, `b` alone, or `alternate`, in turns of `period` versions (`take_turn`). `seed` fixes A on every
    machine, each layer's by its path. Raises `AppError`.
    """
    if train not in HALVES:
        raise AppError(f"lora: train must be one of {', '.join(HALVES)}, not {train!r}")
    rank, period = whole("lora", "rank", rank, 1), whole("lora", "period", period, 1)
    alpha, seed = positive("lora", "alpha", alpha), whole("lora", "seed", seed)
    found = list(_matrices(module, _names(targets)))
    module.requires_grad_(False)
    for path, layer, name in found:
        if others := _other_names(module, getattr(layer, name), f"{path}.{name}".lstrip(".")):
            warnings.warn(f"lora: {path}.{name} is {others[0]} too: {TIED}", stacklevel=2)
        own = seed_of(seed, "lora", path, name)
        adapter = LowRank(getattr(layer, name), rank, alpha, train, period, own)
        # "Unsafe" is only that it is not called now, to see which shape it gives.
        parametrize.register_parametrization(layer, name, adapter, unsafe=True)
    return module


def take_turn(module: nn.Module, version: int) -> None:
    """Of adapters that alternate, the half whose turn it is at `version` trains: first B, then A.

    For an App's `train`, with `self.version`. Where the run deals the halves (`submodel.name = "alternate"`),
    its turns count, not these. Raises `AppError` where none alternate.
    """
    found = [part for part in module.modules() if isinstance(part, LowRank) and part.period]
    if not found:
        raise AppError('no adapter of the model takes turns: make them with lora(..., train="alternate")')
    for part in found:
        part.take_turn(version)


def check_turns(module: nn.Module) -> None:
    """For a training without gradients, as `LowRank.forward` does with them. Raises `AppError`."""
    for part in module.modules():
        if isinstance(part, LowRank):
            part.check_turn()


class Prompted(nn.Module):
    """An encoder with trained tokens in front of its sequence; its output is of the others alone."""

    def __init__(self, encoder: nn.Module, width: int, tokens: int, seed: int) -> None:
        super().__init__()
        self.encoder = encoder
        drawn = normal_draws(seed_of(seed, "prompts"), tokens * width) / math.sqrt(width)
        self.prompts = nn.Parameter(torch.from_numpy(drawn).view(tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to (batch, length, width)."""
        tokens, width = self.prompts.shape
        if x.ndim != 3 or x.shape[2] != width:
            raise AppError(f"prompts: the sequence has shape {tuple(x.shape)}, not (batch, length, {width})")
        prompts = self.prompts.to(x.dtype).expand(len(x), tokens, width)
        output: torch.Tensor = self.encoder(torch.cat([prompts, x], dim=1))
        return output[:, tokens:]


def prompts(encoder: nn.Module, width: int, tokens: int = 8, seed: int = 0) -> Prompted:
    """An encoder of (batch, length, width), frozen, behind `tokens` that are trained: prompt tuning.

    Lester et al. 2021 (arXiv 2104.08691), with the tokens in front of what the encoder is given. They begin
    as draws from N(0, 1 / width), the same on every machine. Raises `AppError`.
    """
    width, tokens = whole("prompts", "width", width, 1), whole("prompts", "tokens", tokens, 1)
    seed = whole("prompts", "seed", seed)
    for path, part in encoder.named_modules():
        if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
            raise AppError(
                f"prompts: {path or 'the encoder'} wants the batch second: make it batch_first=True"
            )
    return Prompted(encoder.requires_grad_(False), width, tokens, seed)


def bias_only(module: nn.Module) -> nn.Module:
    """Freezes all but the parameters whose names end with `bias`: BitFit, Ben Zaken et al. 2021 (2106.10199).

    Those of all layers, norms among them. Raises `AppError` where there are none.
    """
    module.requires_grad_(False)
    found = [p for name, p in module.named_parameters() if name.endswith("bias")]
    if not found:
        raise AppError("bias_only: the model has no biases; train its head, or lora")
    for parameter in found:
        parameter.requires_grad_(True)
    return module


def head_only(module: nn.Module, head: str = "") -> nn.Module:
    """Freezes all but the part at the path `head`: the last layer that has parameters, if none is named.

    Raises `AppError` for a path that is none, or a part without parameters.
    """
    parts = dict(module.named_modules())
    leaves = [path for path, part in parts.items() if any(True for _ in part.parameters(recurse=False))]
    if not head and not leaves:
        raise AppError("head_only: the model has no parameters")
    path = head or leaves[-1]
    if path not in parts or not any(True for _ in parts[path].parameters()):
        raise AppError(
            f"head_only: {path!r} is no part of the model with parameters; its layers are {leaves}"
        )
    module.requires_grad_(False)
    parts[path].requires_grad_(True)
    return module


def has_adapters(module: nn.Module) -> bool:
    """Whether there is something to `merge`."""
    return callable(getattr(module, "merge_and_unload", None)) or any(True for _ in _adapted(module))


def merge(module: nn.Module) -> nn.Module:
    """`module` with W' in the place of W, and no adapters: its layers are plain ones again.

    A model of peft's merges itself. Prompts stay. A weight of two layers of which one has an adapter is two
    weights then, with a warning. Raises `AppError` where there is no adapter.
    """
    if callable(own := getattr(module, "merge_and_unload", None)):
        merged: nn.Module = own()
        return merged
    found = list(_adapted(module))
    if not found:
        raise AppError("the model has no adapters: it never had any, or they are merged already")
    for both in _tied(module):
        warnings.warn(f"merge: {both} are one tensor, and two from here on: {TIED}", stacklevel=2)
    for layer, name in found:
        with torch.no_grad():
            value = getattr(layer, name).clone()
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
        setattr(layer, name, nn.Parameter(value, requires_grad=getattr(layer, name).requires_grad))
        for bias in [own for own in layer._parameters if own.endswith("bias")]:
            layer._parameters[bias] = layer._parameters.pop(bias)  # after the matrices, as layers are made
    return module


def merged(module: nn.Module, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The state dict of `module`, merged, with a run's tensors (`final.safetensors`, an export), by name.

    `module` is changed. Raises `ManifestMismatch` for tensors of another model, and as `merge`.
    """
    given = {name: tuple(np.shape(array)) for name, array in tensors.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if given != wanted:
        other = sorted(name for name in {*given, *wanted} if given.get(name) != wanted.get(name))[0]
        raise ManifestMismatch(
            f"these are tensors of another model: {other!r} has shape {given.get(other)}, in this one "
            f"{wanted.get(other)} (None: it is not there)"
        )
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})
    for both in _tied(module):
        raise AppError(f"merged: {both} are one tensor: {TIED}")
    return {name: tensor.detach().cpu().numpy() for name, tensor in merge(module).state_dict().items()}


def normal_draws(seed: int, count: int) -> Array:
    """Draws from N(0, 1), float32 (count,), the same on every machine: quantiles of the counter's words."""
    uniform = ((coordinate_words(seed, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    quantile = NormalDist().inv_cdf
    return np.array([quantile(u) for u in uniform.tolist()], np.float32)


def _names(targets: object) -> list[str]:
    """The targets. Raises `AppError` where they are no list of names."""
    if isinstance(targets, str):
        raise AppError(f"lora: targets is {targets!r}: give a list of names, [{targets!r}]")
    if not isinstance(targets, Iterable):
        raise AppError(f"lora: targets is {targets!r}: give a list of names, such as {list(TARGETS[:1])}")
    found = list(targets)
    for target in found:
        if not isinstance(target, str):
            name = target.__name__ if isinstance(target, type) else TARGETS[0]
            raise AppError(f"lora: targets has {target!r}, which is no name: write it as text, {name!r}")
    return found


def _matrices(module: nn.Module, targets: Collection[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """The path, the layer and the tensor's name of all that the targets name. Raises `AppError`."""
    layers = [
        (path, layer, kind, [name for name in names if getattr(layer, name) is not None])
        for path, layer in module.named_modules()
        for kind, (cls, names) in MATRICES.items()
        if isinstance(layer, cls)
    ]
    for target in targets:
        if target not in MATRICES and not any(fnmatchcase(path, target) for path, *_ in layers):
            raise AppError(f"lora: no layer is named by the target {target!r}: {_choice(layers)}")
    named = [row for row in layers if any(t == row[2] or fnmatchcase(row[0], t) for t in targets)]
    if not named:
        raise AppError(f"lora: no layer is named by targets = {sorted(targets)}: {_choice(layers)}")
    for path, layer, _, names in named:
        for name in names:
            if flaw := _flaw(layer, name):
                raise AppError(f"lora: {f'{path}.{name}'.lstrip('.')} {flaw}")
            yield path, layer, name


def _flaw(layer: nn.Module, name: str) -> str:
    """Why a tensor is no place for an adapter; empty where it is one."""
    # Norms of torch.nn.utils and pruning compute it before each call, and keep it as a plain attribute.
    own = {**layer._parameters, **layer._buffers}.get(name)
    if own is None or parametrize.is_parametrized(layer, name):
        return "is computed already, by an adapter, a norm or pruning: leave the layer out of the targets"
    if nn.parameter.is_lazy(own):
        return "has no shape yet: call the model once, with an example, before lora"
    if not (own.is_floating_point() or own.is_complex()):
        kind = str(own.dtype).removeprefix("torch.")
        return f"is {kind}, no floats: leave the layer out of the targets, or load it in float32"
    return ""


def _other_names(module: nn.Module, tensor: object, own: str) -> list[str]:
    """What else this parameter is called in the module; a layer in several places is called by the first."""
    return [
        name
        for path, layer in module.named_modules()
        for name, parameter in layer.named_parameters(path, recurse=False, remove_duplicate=False)
        if parameter is tensor and name != own
    ]


def _choice(layers: Sequence[tuple[str, nn.Module, str, list[str]]]) -> str:
    """What there is to name."""
    if not layers:
        return f"the model has none of {', '.join(MATRICES)}"
    return "there are " + ", ".join(f"{path or 'the model'} ({kind})" for path, _, kind, _ in layers[:12])


def _tied(module: nn.Module) -> Iterator[str]:
    """Of each weight that has an adapter, and other names beside the layer's, two of its names."""
    for layer, name in _adapted(module):
        original = layer.parametrizations[name].original  # type: ignore[union-attr,index]
        names = _other_names(module, original, "")
        if len(names) > 1:
            yield f"{names[0]} and {names[1]}"


def _adapted(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layers with adapters, and the tensors' names."""
    for layer in list(module.modules()):
        for name, steps in dict(getattr(layer, "parametrizations", {}) or {}).items():
            if any(isinstance(step, LowRank) for step in steps):
                yield layer, name
