"""The examples are Flower apps like any other, and learn without rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from anabranch.core.config.tables import Config, merge
from anabranch.simulation.run import simulate
from anabranch.workloads import load_app

EXAMPLES = Path(__file__).parents[2] / "examples"


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def with_scikit_learn() -> None:
    """Not where the file is collected: each worker would load scipy for it."""
    pytest.importorskip("sklearn", reason="the examples' data comes with scikit-learn")


def configured(name: str) -> Config:
    spec = f"flower:{EXAMPLES / name}"
    tables = {
        "run": {"workload": spec, "updates_max": 40, "evaluate_every_versions": 20},
        "fleet": {"clients": 4},
        "strategy": {"name": "fedasync"},
    }
    app = load_app(spec)
    app.join(tables)
    return merge([("app", app.settings(0)), ("test", tables)])


@pytest.mark.parametrize("name", ["flower-quickstart-numpy", "flower-quickstart-torch"])
def test_an_example_learns_the_same_each_time(name: str) -> None:
    if name.endswith("torch"):
        pytest.importorskip("torch")
    config = configured(name)
    result = simulate(config)
    assert result.final_accuracy is not None
    assert result.final_accuracy > 0.7
    again = simulate(replace(config, run=replace(config.run, evaluate_every_versions=0)))
    assert again.model_sha256 == result.model_sha256


def test_the_examples_know_nothing_of_us() -> None:
    for path in EXAMPLES.glob("flower-*/**/*"):
        if path.suffix in (".py", ".toml"):
            assert "anabranch" not in path.read_text(encoding="utf-8"), path
