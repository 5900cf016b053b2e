"""A torch module that stays on its device while tasks come and go: weights in, weights out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.core.errors import AppError
from anabranch.core.model.arrays import plain
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.submodels import TensorSet
from anabranch.workloads.app import App
from anabranch.workloads.calls import broken
from anabranch.workloads.torch_loop import import_torch
from anabranch.workloads.trainer import check_vector

if TYPE_CHECKING:
    import torch


def place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where its numbers lie: the same for all names of one tensor."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def last_names(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[object, str]:
    """Of each tensor, by its place, the last of its names: a state that is loaded leaves what that says."""
    return {place(state[name]): name for name in names}


class Resident:
    """`module` of an App, with the `spec` of its state dict; weights cross to its device as one flat vector.

    `frozen`: the tensors that are not aggregated, for tasks that bring none. `scratch`: what buffers
    outside the state dict start every task with, so that nothing is carried over; nor is the form in which a
    training leaves the module, as other libraries' trainers may: on another device, cast, with parts frozen.
    """

    def __init__(
        self, app: App, module: torch.nn.Module, spec: ParamSpec, frozen: Tensors, scratch: Mapping[str, Any]
    ) -> None:
        self._torch, self._app = import_torch(), app
        self.module, self.spec, self.scratch = module, spec, scratch
        self.frozen = frozen
        self._device = next(iter(module.state_dict().values())).device  # of what crosses as one vector
        self._form = {name: (t.device, t.dtype, t.requires_grad) for name, t in self._tensors()}

    def load(self, vector: Vector, frozen: Tensors) -> torch.Tensor:
        """Puts the weights into the module; returns them as it has them, one vector on the device.

        A difference to it is what was trained, and nothing that every device would send at once. A tensor of
        several names has what its last one says, so each has, and none the way from one name's numbers to
        another's, which differ once a codec has rounded them. One of fewer digits than the vector rounds.
        Raises `ManifestMismatch` for a vector of another size.
        """
        check_vector(self.spec, vector)
        self.reset()
        slices, state = self.spec.slices, self.module.state_dict()
        given: torch.Tensor = self._torch.from_numpy(np.array(vector, self.spec.vector_dtype))
        given = given.to(self._device)
        with self._torch.no_grad():
            for name, tensor in state.items():
                if name in slices:
                    tensor.copy_(given[slices[name]].view(tensor.shape))
                else:
                    tensor.copy_(self._torch.tensor(frozen.get(name, self.frozen[name])))
            last = last_names(state, slices)
            for name, at in slices.items():
                tensor = state[name]
                if last[place(tensor)] != name or tensor.dtype != given.dtype:
                    given[at].copy_(tensor.reshape(-1))
        return given

    def check_part(self, part: TensorSet) -> None:
        """Raises `AppError` where a tensor of the part has another name, which is in another part."""
        state, names = self.module.state_dict(), frozenset(part.names)
        inside = {place(state[name]): name for name in names if state[name].numel()}
        for name in self.spec.slices:
            own = inside.get(place(state[name]))
            if own is not None and name not in names:
                raise AppError(
                    f"{own!r} and {name!r} are one tensor, of which a task would send one name and not the "
                    "other: set submodel.name = 'none', or leave one of the names out of the model's state"
                )

    def reset(self) -> None:
        """Sets the form of the tensors back, and the buffers that are not in the state dict."""
        if any(tensor.is_meta for _, tensor in self._tensors()):  # without values, which whoever loads brings
            self.module.to_empty(device=self._device)
        for name, tensor in self._tensors():
            device, dtype, is_trained = self._form.get(
                name, (tensor.device, tensor.dtype, tensor.requires_grad)
            )
            if (tensor.device, tensor.dtype) != (device, dtype):
                tensor.data = tensor.data.to(device, dtype)
            if tensor.requires_grad != is_trained:
                tensor.requires_grad_(is_trained)
        buffers = dict(self.module.named_buffers())
        with self._torch.no_grad():
            for name, start in self.scratch.items():
                buffers[name].copy_(start)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    def flat(self) -> torch.Tensor:
        """The weights as one vector on the device. Raises `AppError` where training left another model."""
        state = self.module.state_dict()
        if others := state.keys() ^ {*self.spec.slices, *self.frozen}:
            raise self._broken(
                f"it changed which tensors the model has ({', '.join(sorted(others))}): "
                "they must stay those that `model` returned"
            )
        if lost := next((name for name in self.spec.slices if state[name].is_meta), ""):
            raise self._broken(
                f"it left {lost!r} on the meta device, without values: give the model its weights back "
                "before train returns"
            )
        for tensor in self.spec.tensors:
            if (shape := tuple(state[tensor.name].shape)) != tensor.shape:
                raise self._broken(f"it changed the shape of {tensor.name!r} from {tensor.shape} to {shape}")
        dtype = self._torch.float64 if self.spec.vector_dtype == np.float64 else self._torch.float32
        found: torch.Tensor = self._torch.cat(
            [state[name].reshape(-1).to(self._device, dtype) for name in self.spec.slices]
        )
        return found

    def _broken(self, said: str) -> AppError:
        return broken(self._app, "train", said)


class LiveModule:
    """The weights of a resident module that was given `vector`, while it is trained: see `LiveWeights`.

    What tensors of fewer digits lose of what they are given is kept beside them: else each exchange would
    send it as training.
    """

    def __init__(self, resident: Resident, vector: Vector) -> None:
        self._torch, self._resident = import_torch(), resident
        self._lost = vector - self._held() if resident.spec.rounds else None

    def _held(self) -> Vector:
        found: Vector = self._resident.flat().cpu().numpy()
        return found

    def flat(self) -> Vector:
        """A copy on the host."""
        return self._held() if self._lost is None else self._held() + self._lost

    def add(self, change: Vector) -> None:
        """Add in place, on the device; to a tensor of several names once, as its last one says."""
        slices, state = self._resident.spec.slices, self._resident.module.state_dict()
        wanted = None if self._lost is None else self.flat() + change
        given = self._torch.from_numpy(plain(change if wanted is None else wanted))
        with self._torch.no_grad():
            for name in last_names(state, slices).values():
                tensor, at = state[name], slices[name]
                its = given[at].view(tensor.shape).to(tensor.device, tensor.dtype)
                tensor.add_(its) if wanted is None else tensor.copy_(its)
        if wanted is not None:
            self._lost = wanted - self._held()
