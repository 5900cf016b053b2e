"""A model of Keras, on whatever backend: its weights by name are the App's model, and `fit` trains them.

KERAS_BACKEND=torch anabranch simulate examples/keras_digits.py:Digits --updates 60
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import anabranch


class Digits(anabranch.App):
    """A small network for images of 8 x 8, whose batch norm has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def model(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Its weights. A name begins with a number, as layers of one kind have the same names within."""
        keras.utils.set_random_seed(seed % 2**32)
        self.net = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(10),
            ]
        )
        return {name: np.array(array) for name, array in self._named(self.net.get_weights())}

    def _named(self, values: list[Any]) -> list[tuple[str, Any]]:
        return [
            (f"{i:03d}.{w.name}", value)
            for i, (w, value) in enumerate(zip(self.net.weights, values, strict=True))
        ]

    def buffers(self, model: dict[str, np.ndarray]) -> list[str]:
        """The running statistics: what nobody trains."""
        return [name for name in model if "moving_" in name]

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """Every part of the digits."""
        x, y = load_digits(return_X_y=True)
        x = (x / 16).astype(np.float32)
        if shard.role != "train":
            return anabranch.Examples(x[1500:], y[1500:])
        return anabranch.Examples(x[shard.index : 1500 : shard.count], y[shard.index : 1500 : shard.count])

    def _loaded(self, model: dict[str, np.ndarray], learning_rate: float = 0.0) -> Any:
        """The network with these weights, and an optimizer that remembers nothing."""
        self.net.set_weights([array for _, array in sorted(model.items())])
        self.net.compile(
            optimizer=keras.optimizers.SGD(learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return self.net

    def train(
        self, model: dict[str, np.ndarray], examples: anabranch.Examples, plan: anabranch.LocalPlan, seed: int
    ) -> dict[str, float]:
        """An epoch or more of `fit`."""
        net = self._loaded(model, plan.learning_rate)
        keras.utils.set_random_seed(seed % 2**32)
        told = net.fit(examples.x, examples.y, plan.batch_size, epochs=plan.epochs, verbose=0)
        for name, array in self._named(net.get_weights()):
            model[name][...] = array
        steps = plan.epochs * -(-len(examples) // plan.batch_size)
        return {"loss": told.history["loss"][-1], "steps": steps}

    def evaluate(self, model: dict[str, np.ndarray], examples: anabranch.Examples) -> dict[str, float]:
        """As Keras measures it."""
        loss, accuracy = self._loaded(model).evaluate(examples.x, examples.y, verbose=0)
        return {"accuracy": accuracy, "loss": loss}
