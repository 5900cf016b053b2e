"""Train K numbers in the place of a model's n: what travels either way is K numbers, whatever the model.

    w = w_0 + U a

| symbol | meaning                                        | here                                    |
|--------|------------------------------------------------|-----------------------------------------|
| w_0    | the model's own start, the same on each device | what the wrapped App's `model` returns  |
| a      | what is trained, sent and folded, (K,)         | the parameter of the module             |
| K      | how many numbers                               | `dimension`                             |
| U      | n x K, orthonormal columns, fixed by a seed    | `Hashing`: no matrix, O(n)              |
| h(j)   | which of the K numbers coordinate j reads      | `Hashing.index`                         |
| s(j)   | its sign                                       | the sign of `Hashing.scale`             |
| c_k    | how many coordinates read number k             | 1 / sqrt(c) is the size of `scale`      |

    (U a)_j = s(j) a_h(j) / sqrt(c_h(j))          (U' g)_k = sum over j with h(j) = k of s(j) g_j / sqrt(c_k)

That shared randomness stands in for what would be sent is the idea of Just One Byte (Zelikman et al., arXiv
2306.10015) and FedKSeed (Qin et al., arXiv 2312.06353), which draw normal directions and train without
gradients. The hashed U is ours: it is exact on every machine, and gradients go through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import random_words
from anabranch.workloads import calls
from anabranch.workloads.app import App, Array, Examples, Model, Shard, has_own
from anabranch.workloads.arguments import whole

NUMBER = 4  # of this use of the generator, as the stages of a codec have theirs
LAYERS = ("all", "each")
BASE = "base_sha256"  # the name of the tensor that says what the numbers are of


@dataclass(frozen=True, eq=False)
class Hashing:
    """U for n coordinates: `index` int32 (n,), below `dimension`; `scale` float32 (n,)."""

    index: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    dimension: int

    @classmethod
    def of(cls, index: Array, signs: Array, dimension: int) -> Hashing:
        """From h and s, each (n,). A number that no coordinate reads contributes nothing."""
        read = np.bincount(index, minlength=dimension)
        scale = signs / np.sqrt(read[index].astype(np.float64))
        return cls(index.astype(np.int32), scale.astype(np.float32), dimension)

    @classmethod
    def drawn(cls, words: npt.NDArray[np.uint64], dimension: int) -> Hashing:
        """From a word of 64 random bits a coordinate: h from the upper half, s from the lowest bit."""
        index = ((words >> np.uint64(32)) * np.uint64(dimension)) >> np.uint64(32)
        return cls.of(index.astype(np.int64), 1 - 2 * (words & np.uint64(1)).astype(np.int64), dimension)

    def expand(self, numbers: Array) -> npt.NDArray[np.float32]:
        """U a, (n,), of a (K,)."""
        found: npt.NDArray[np.float32] = numbers.astype(np.float32)[self.index] * self.scale
        return found

    def project(self, gradient: Array) -> npt.NDArray[np.float32]:
        """U' g, (K,), of g (n,)."""
        weighed = gradient.astype(np.float64) * self.scale
        return np.bincount(self.index, weighed, self.dimension).astype(np.float32)


def coordinate_words(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """A random word for each coordinate."""
    found: npt.NDArray[np.uint64] = random_words(seed, NUMBER).random_raw(count)
    return found


def dealt(dimension: int, sizes: Sequence[int]) -> list[int]:
    """K over tensors in proportion to the root of their sizes: at least 1 each, at most its size.

    `len(sizes) <= dimension <= sum(sizes)`.
    """
    roots = np.sqrt(np.asarray(sizes, np.float64))
    wanted = dimension * roots / roots.sum()
    found = np.clip(np.floor(wanted), 1, sizes).astype(np.int64)
    while (left := dimension - int(found.sum())) != 0:
        open_ = found < sizes if left > 0 else found > 1
        short = np.where(open_, (wanted - found) * np.sign(left), -np.inf)
        found[int(short.argmax())] += int(np.sign(left))
    return [int(k) for k in found]


def _of_wrapped(name: str) -> Any:
    """An attribute that lies with the wrapped App: its methods read it there, and set `kept` there."""
    return property(lambda own: getattr(own.app, name), lambda own, value: setattr(own.app, name, value))


class Subspace(App):
    """An App whose model is `dimension` numbers that move all weights of another App's torch model.

        class Small(Subspace):
            def __init__(self, data_path: str = "") -> None:
                super().__init__(Digits(data_path), dimension=256)

    `layers`: `all` parameters share the numbers; or `each` tensor of more than one dimension has its own,
    dealt in proportion to the roots of their sizes, and biases and norms are trained as they are. What the
    wrapped App freezes stays. `seed` fixes U and the wrapped App's start.

    Raises `AppError` for a dimension below 1 or above the number of weights, for a model of numpy arrays, and
    for one with buffers, or weights that are no floats; `ManifestMismatch` where the run is of another start
    or U.
    """

    options, runtime, version = _of_wrapped("options"), _of_wrapped("runtime"), _of_wrapped("version")
    kept, zeroth = _of_wrapped("kept"), _of_wrapped("zeroth")
    join = _of_wrapped("join")  # its very method: whether an App has one of its own is asked too

    def __init__(self, app: App, dimension: int, seed: int = 0, layers: str = "all") -> None:
        super().__init__(app.data_path)
        self.app, self.layers = app, layers
        self.own_data, self.measures = app.own_data, app.measures
        if type(self) is Subspace:
            self.name = f"{app.name}-subspace"
        if layers not in LAYERS:
            raise AppError(f"{self.name}: layers must be one of {', '.join(LAYERS)}, not {layers!r}")
        self.dimension = whole(self.name, "dimension", dimension, 1)
        self.seed = whole(self.name, "seed", seed)

    def model(self) -> Model:
        """The module of the numbers, all zero: the wrapped App's start."""
        from anabranch.workloads.frozen_tensors import freeze_others
        from anabranch.workloads.loadable import check_loadable
        from anabranch.workloads.subspace_module import SubspaceModule
        from anabranch.workloads.torch_loop import TorchRuntime

        with TorchRuntime().seeded(self.seed):
            base = calls.model_of(self.app, self.seed)
        if isinstance(base, dict):
            raise AppError(
                f"{self.name}: {self.app.name} has a model of numpy arrays, and only its own train has their "
                "gradients: use Hashing.expand and Hashing.project there"
            )
        check_loadable(base, self.name)
        named = freeze_others(self.app, base) or frozenset()
        if unknown := sorted(named - base.state_dict().keys()):
            raise AppError(f"{self.app.name}: trained names {unknown[0]!r}, which is no tensor of its model")
        return SubspaceModule(base, self.dimension, self.seed, self.layers, self.name)

    def data(self, shard: Shard) -> Any:
        """The wrapped App's."""
        return self.app.data(shard)

    def arrived(self, examples: Examples, now: float) -> Any:
        """The wrapped App's."""
        return self.app.arrived(examples, now)

    def drift(self, examples: Examples, share: Array) -> Examples | None:
        """The wrapped App's."""
        return self.app.drift(examples, share)

    def settings(self, seed: int) -> Mapping[str, Mapping[str, Any]]:
        """The wrapped App's."""
        return self.app.settings(seed)

    def units(self, model: Model) -> tuple[UnitGroup, ...]:
        """None: a number belongs to no neuron."""
        del model
        return ()

    def train(self, model: Model, examples: Examples, plan: LocalPlan, seed: int) -> Any:
        """The wrapped App's, on the numbers: the learning rate is theirs."""
        model.check()
        return self.app.train(model, examples, plan, seed)

    def train_zeroth(self, model: Model, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """The wrapped App's, on the numbers: two losses for each slope among K, not n."""
        model.check()
        return self.app.train_zeroth(model, examples, plan, seed)

    def evaluate(self, model: Model, examples: Examples) -> dict[str, float]:
        """The wrapped App's, of the model that the numbers make."""
        model.check()
        return self.app.evaluate(model, examples)

    def merged(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The wrapped App's state dict w_0 + U a, of a run's tensors (`final.safetensors`, an export).

        By its own `merged`, where it has one, and without its adapters, where it has any. Raises
        `ManifestMismatch` for tensors of another model, start or U.
        """
        from anabranch.workloads.adapters import has_adapters

        module = self.model()
        given = {name: tuple(np.shape(array)) for name, array in tensors.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if given != wanted:
            raise ManifestMismatch(f"{self.name} has tensors of shapes {wanted}, the file {given}")
        module.take(tensors)
        module.check()
        found: dict[str, Array] = module.merged()
        own = has_own(self.app, "merged")
        return dict(self.app.merged(found)) if own or has_adapters(module.base) else found
