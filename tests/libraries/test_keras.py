"""A model of Keras: its weights travel, running statistics among them; the model itself is refused."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # which is there; read when it is imported

from typing import Any

import keras
import numpy as np
import pytest

import anabranch as ab
from anabranch.core.errors import AppError
from anabranch.support.code import load
from anabranch.workloads import trainer_for
from scripts import EXAMPLES

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]


def test_the_example_learns_and_its_statistics_follow() -> None:
    app = load(f"{EXAMPLES / 'keras_digits.py'}:Digits")
    run = ab.simulate(app, fleet=ab.Fleet(clients=4), until=ab.Until(updates=60), seed=1)
    first = trainer_for(app()).initial(0)
    means = next(name for name in first if "moving_mean" in name)
    assert not first[means].any()
    assert np.abs(run.weights()[means]).max() > 0.1, "no longer as they began"
    assert run.history.to_pandas()["accuracy"].iloc[-1] > 0.5, "one in ten is a guess"


def test_the_model_itself_is_refused() -> None:
    class Itself(ab.App):
        def model(self) -> Any:
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    with pytest.raises(AppError, match=r"a model of Keras.*examples/keras_digits.py"):
        trainer_for(Itself())
