"""Apps and configurations that people on a walk bring along."""

# A device's code in numpy alone: softmax regression, every line of it the user's.
MY_APP = '''
import numpy as np

import anabranch


def softmax(scores):
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class App(anabranch.App):
    """Which of three corners a point is nearest to."""

    def model(self):
        return {"0.weight": np.zeros((2, 3), np.float32), "0.bias": np.zeros(3, np.float32)}

    def data(self, shard):
        draws = np.random.default_rng([shard.index, len(shard.role)])
        x = draws.normal(size=(120, 2)).astype(np.float32)
        corners = np.array([[1, 0], [-1, 1], [-1, -1]], np.float32)
        return anabranch.Examples(x, (x @ corners.T).argmax(1))

    def train(self, model, examples, plan, seed):
        for _ in range(20):
            wrong = softmax(examples.x @ model["0.weight"] + model["0.bias"])
            wrong[np.arange(len(examples)), examples.y] -= 1
            model["0.weight"] -= plan.learning_rate * examples.x.T @ wrong / len(examples)
            model["0.bias"] -= plan.learning_rate * wrong.mean(0)
        return {"loss": float(np.abs(wrong).mean())}

    def evaluate(self, model, examples):
        chances = softmax(examples.x @ model["0.weight"] + model["0.bias"])
        return {
            "accuracy": float((chances.argmax(1) == examples.y).mean()),
            "loss": float(-np.log(chances[np.arange(len(examples)), examples.y]).mean()),
        }
'''

# Versions come quickly, from any two updates, and none is the last.
ENDLESS = """
[run]
name = "corners"
workload = "my_app.py:App"
[strategy]
name = "fedbuff"
buffer_size = 2
"""

# Torch, with a buffer that is no parameter.
TORCH_APP = '''
import numpy as np
import torch

import anabranch


class App(anabranch.App):
    """Which of three corners a point is nearest to."""

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def data(self, shard):
        draws = np.random.default_rng([shard.index, len(shard.role)])
        x = draws.normal(size=(120, 2)).astype(np.float32)
        corners = np.array([[1, 0], [-1, 1], [-1, -1]], np.float32)
        return anabranch.Examples(x, (x @ corners.T).argmax(1))
'''

# Steps that are far too long.
DIVERGING = """
[run]
workload = "my_app.py:App"
updates_max = 1000
[client]
learning_rate = 1e38
"""
