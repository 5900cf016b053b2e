"""The trainer of torch Apps: one module stays on the device, and each task loads its weights into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from anabranch.core.errors import AppError
from anabranch.core.params import ParamSpec, Tensors, Vector
from anabranch.core.updates import LocalPlan
from anabranch.workloads.app import App, Array, Examples
from anabranch.workloads.torch_loop import TorchRuntime, import_torch
from anabranch.workloads.trainer import TrainResult, build_model, check_vector, result_of

if TYPE_CHECKING:
    import torch


class TorchTrainer:
    """Trains on `device`; on a CPU the same inputs give the same delta, bit for bit.

    Weights cross to the device as one flat vector and come back as one. Buffers that are not in the
    state dict are set back before each task, so nothing is carried from task to task.
    """

    def __init__(self, app: App, device: str = "cpu", precision: str = "auto") -> None:
        self._torch = import_torch()
        self.runtime = TorchRuntime(device, precision)
        self._app = app
        self._module: torch.nn.Module = self._built(0).to(self.runtime.device)
        built = self._arrays(self._module)
        self.spec = ParamSpec.of(built)
        if self.spec.size == 0:
            raise AppError(f"{app.name}: model() has no float parameters, so there is nothing to learn")
        self._frozen = self.spec.frozen(built)
        self._scratch = {n: b.clone() for n, b in self._module.named_buffers() if n not in built}

    def initial(self, seed: int) -> dict[str, Array]:
        """The state dict of a new model, built with torch's generators seeded."""
        return self._arrays(self._built(seed))

    def train(
        self, vector: Vector, frozen: Tensors, examples: Examples, plan: LocalPlan, seed: int
    ) -> TrainResult:
        """Local training from `vector` by the App's `train`, under torch's generators seeded."""
        given = self._load(vector, frozen)
        self._module.train()
        with self.runtime.seeded(seed):
            metrics = self._app.train(self._module, examples, plan, seed)
        self._module.zero_grad(set_to_none=True)
        delta = (self._flat() - given).cpu().numpy()
        return result_of(delta, metrics, plan, examples, self._app.name)

    def evaluate(self, vector: Vector, frozen: Tensors, examples: Examples) -> dict[str, float]:
        """The App's evaluation of the module in evaluation mode."""
        self._load(vector, frozen)
        self._module.eval()
        return dict(self._app.evaluate(self._module, examples))

    def _built(self, seed: int) -> torch.nn.Module:
        with self.runtime.seeded(seed):
            module: torch.nn.Module = build_model(self._app, seed)
        return module

    def _load(self, vector: Vector, frozen: Tensors) -> torch.Tensor:
        """Puts the weights into the module; returns them as one vector on the device."""
        check_vector(self.spec, vector)
        self._app.runtime = self.runtime
        given: torch.Tensor = self._torch.from_numpy(np.array(vector, self.spec.vector_dtype))
        given = given.to(self.runtime.device)
        slices, state = self.spec.slices, self._module.state_dict()
        with self._torch.no_grad():
            for name, tensor in state.items():
                if name in slices:
                    tensor.copy_(given[slices[name]].view(tensor.shape))
                else:
                    tensor.copy_(self._torch.tensor(frozen.get(name, self._frozen[name])))
            buffers = dict(self._module.named_buffers())
            for name, start in self._scratch.items():
                buffers[name].copy_(start)
        return given

    def _flat(self) -> torch.Tensor:
        state = self._module.state_dict()
        dtype = self._torch.float64 if self.spec.vector_dtype == np.float64 else self._torch.float32
        parts = [state[name].reshape(-1).to(dtype) for name in self.spec.slices]
        found: torch.Tensor = self._torch.cat(parts)
        if found.numel() != self.spec.size:
            raise AppError(f"{self._app.name}: train changed the shape of the model")
        return found

    def _arrays(self, module: torch.nn.Module) -> dict[str, Array]:
        out = {}
        for name, tensor in module.state_dict().items():
            if tensor.dtype == self._torch.bfloat16:
                raise AppError(
                    f"{self._app.name}: tensor {name!r} is bfloat16: keep weights in float32, "
                    "client.precision = 'bfloat16' computes in it"
                )
            out[name] = tensor.detach().cpu().numpy().copy()
        return out
