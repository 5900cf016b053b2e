"""FedAvg by pfl (PyTorch, one user after the other), as its documentation sets one up.

PEER/bin/python benchmarks/peer_scripts/with_pfl.py TASK.npz
"""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from turn import CLASSES, DIGITS, HIDDEN, SharedWork, take_turn


class PflNet(nn.Sequential):
    """A model as pfl wants one: with its loss and its metrics."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Of a data set."""
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


def net(problem: str) -> PflNet:
    """The model of `anabranch.workloads` of that name."""
    if problem == DIGITS:
        return PflNet(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return PflNet(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 60),
        nn.ReLU(),
        nn.Linear(60, CLASSES),
    )


def train(task: SharedWork, rounds: int) -> float:
    """Every user in every round; no evaluation on users' data."""
    module = net(task.problem)
    users = {
        device: [torch.from_numpy(task.x[device]), torch.from_numpy(task.y[device])]
        for device in range(task.devices)
    }
    data = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=task.devices,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task.epochs,
            local_learning_rate=task.learning_rate,
            local_batch_size=task.batch_size,
        ),
    )
    test = Dataset([torch.from_numpy(task.test_x), torch.from_numpy(task.test_y)])
    return float(next(iter(model.evaluate(test)))[1].overall_value)


if __name__ == "__main__":
    take_turn(train)
