"""`anabranch check`: what works is said to work, and each thing that does not is found."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import anabranch
from torch.utils.data import DataLoader, TensorDataset

from anabranch.client.checkup import Checkup, Finding, _has_all
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable, Config, FleetTable, SubmodelTable
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.adapters import lora
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import batches
from anabranch.workloads.synthetic import Synthetic

X = np.random.default_rng(3).normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


class Sound(App):
    """Nothing to find."""

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def data(self, shard: Shard) -> Any:
        rows = slice(shard.index, 16, shard.count) if shard.role == "train" else slice(16, None)
        return Examples(X[rows], Y[rows])


def checked(app: App) -> list[Finding]:
    return list(Checkup(app, Config().to_json(), LocalPlan(), 4))


def found(app: App, level: str) -> dict[str, str]:
    return {f.about: f.text for f in checked(app) if f.level == level}


def test_a_sound_app_has_nothing_to_find() -> None:
    findings = checked(Sound())
    assert {f.level for f in findings} == {"ok"}
    assert [f.about for f in findings] == [
        *("model", "data", "data", "data", "training", "restart", "export", "evaluation", "sub-models")
    ]
    assert findings[-1].text.startswith("they may leave out units: ")
    assert " of layer 0" in findings[-1].text, findings[-1].text


class Norm(Sound):
    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def test_buffers_are_named_and_survive_restart_and_export() -> None:
    findings = {f.about: f for f in checked(Norm())}
    assert findings["buffers"].text.startswith("1.running_mean, 1.running_var, 1.num_batches_tracked")
    assert {findings[about].level for about in ("restart", "export", "evaluation")} == {"ok"}


class Evaluating(torch.nn.BatchNorm1d):
    """Never in training mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # whatever `mode` says


class FrozenNorm(Norm):
    """A part that was trained elsewhere, with its norm, and a head."""

    def __init__(self, norm: type[torch.nn.BatchNorm1d]) -> None:
        super().__init__()
        self._norm = norm

    def model(self) -> Any:
        trunk = torch.nn.Sequential(torch.nn.Linear(4, 8), self._norm(8)).requires_grad_(False)
        return torch.nn.Sequential(trunk, torch.nn.Linear(8, 2))


def test_a_frozen_norm_that_goes_by_the_batch_is_told() -> None:
    told = found(FrozenNorm(torch.nn.BatchNorm1d), "warn")["frozen"]
    assert told.startswith("0.1: in training they normalise by the batch")
    assert "frozen" not in found(FrozenNorm(Evaluating), "warn")
    assert "frozen" not in found(Norm(), "warn")


class Tied(Sound):
    def model(self) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model


def test_a_tensor_of_two_names_is_said_to_travel_twice() -> None:
    assert found(Tied(), "warn")["model"] == (
        "0.weight, 2.weight are one tensor, which travels once for each name"
    )


class Column(Sound):
    """Outputs of shape (n, 1) beside values of shape (n,): each is compared with all."""

    loss = torch.nn.functional.mse_loss

    def model(self) -> Any:
        return torch.nn.Linear(4, 1)

    def data(self, shard: Shard) -> Any:
        return Examples(X, X[:, 0])


def test_shapes_that_a_loss_broadcasts_are_found() -> None:
    said = found(Column(), "warn")["training"]
    assert "torch.Size([24])" in said
    assert "Give outputs and y one shape" in said


class Columns(Sound):
    def data(self, shard: Shard) -> Any:
        return Examples(X, Y[:, None])


class Explodes(Sound):
    def data(self, shard: Shard) -> Any:
        return Examples(X * np.float32(1e30), Y)


class NotANumber(Sound):
    def data(self, shard: Shard) -> Any:
        return Examples(np.where(X > 2, np.float32(np.nan), X), Y)


class Still(Sound):
    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        return {}


class Raises(Sound):
    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        raise ValueError("a mistake")


class ShortSeed(Sound):
    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        np.random.RandomState(seed)
        return super().train(model, examples, plan, seed)


class NoModel(Sound):
    def model(self) -> Any:
        return 3


class NoData(Sound):
    def data(self, shard: Shard) -> Any:
        return None


class BadEvaluation(Sound):
    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"accuracy": float("nan")}


@pytest.mark.parametrize(
    ("app", "about", "words"),
    [
        (Explodes(), "training", "lower the rate"),
        (NotANumber(), "training", "mend the data"),
        (Columns(), "training", "Columns: y has shape (n, 1)"),
        (Still(), "training", "no weight has moved"),
        (Raises(), "training", "on this device: ValueError: a mistake"),
        (ShortSeed(), "training", "Seed must be between 0 and 2**32 - 1"),
        (NoModel(), "model", "returned int"),
        (NoData(), "data", "data returned a NoneType"),
        (BadEvaluation(), "evaluation", "accuracy nan"),
    ],
)
def test_what_will_not_work_fails(app: App, about: str, words: str) -> None:
    failures = found(app, "fail")
    assert list(failures) == [about]
    assert words in failures[about]


def test_data_that_are_not_finite_are_counted() -> None:
    told = [f.text for f in checked(NotANumber()) if f.level == "warn"]
    assert f"x has {int((X > 2).sum())} of 96 values that are not finite" in told


class FlawedElsewhere(Sound):
    """Of four devices the third and the fourth have what is no number."""

    def data(self, shard: Shard) -> Any:
        found = super().data(shard)
        if shard.role != "train" or shard.index < 2:
            return found
        x = found.x.copy()
        x[1, :2] = np.nan, np.inf
        return Examples(x, found.y)


class LeavesThemOut(FlawedElsewhere):
    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        sound = np.isfinite(examples.x).all(1)
        return super().train(model, Examples(examples.x[sound], examples.y[sound]), plan, seed)


def test_the_values_of_all_devices_are_looked_at() -> None:
    flaw = "shard 2/4: x has 2 of 16 values that are not finite; so have shards 3"
    assert flaw in [f.text for f in checked(FlawedElsewhere()) if (f.level, f.about) == ("warn", "data")]
    assert found(FlawedElsewhere(), "fail") == {
        "training": "not finite with those values of shard 2: mend the data, or leave those rows out"
    }
    assert flaw in [f.text for f in checked(LeavesThemOut()) if (f.level, f.about) == ("warn", "data")]
    assert found(LeavesThemOut(), "fail") == {}


def test_a_device_says_once_what_is_no_number_in_its_data(caplog: pytest.LogCaptureFixture) -> None:
    local = LocalTrainer(FlawedElsewhere(), ClientTable())
    local.load(Shard("train", 0, 4))
    assert "not finite" not in caplog.text
    local.load(Shard("train", 3, 4))
    (said,) = (r.message for r in caplog.records if "not finite" in r.message)
    assert said.startswith("this device's data: x has 2 of 16 values that are not finite: ")
    assert said.endswith("mend the data")


def test_values_are_counted_through_all_blocks() -> None:
    x = np.zeros((3 * 1024 + 1, 1024), np.float32)
    x[0, 0], x[1500, 7], x[-1, -1] = np.nan, -np.inf, np.inf
    y = np.where(np.arange(len(x)) == 5, np.nan, 1.0)
    size = len(x) * 1024
    assert Examples(x, y).not_finite() == [
        f"x has 3 of {size} values that are not finite",
        f"y has 1 of {len(x)} values that are not finite",
    ]
    assert Examples(x[2:9], np.zeros(7, np.int64)).not_finite() == []


def test_a_part_that_is_looked_through_is_not_copied() -> None:
    """It may be mapped from a disk, and larger than the memory."""
    there = Examples(np.arange(1 << 20, dtype=np.float32).reshape(-1, 64), np.zeros(1 << 14, np.int64))
    mine = Examples(there.x[:10], there.y[:10] + 1)
    tracemalloc.start()
    found = _has_all(there, mine)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not found
    assert most < there.x.nbytes / 4


class Fixed(Sound):
    def model(self) -> Any:
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model


class Detached(torch.nn.Linear):
    """Its weight asks for a gradient, and none reaches it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.detach(), self.bias)


class Unmoved(Sound):
    def model(self) -> Any:
        return torch.nn.Sequential(Detached(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


class Drawn(Sound):
    calls = 0

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        self.calls += 1
        with torch.no_grad():
            model[0].bias += float(self.calls)
        return {}


class Loader(Sound):
    loss = torch.nn.CrossEntropyLoss()

    def data(self, shard: Shard) -> Any:
        return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=8)


class Heard(Loader):
    """It knows for which shards it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def data(self, shard: Shard) -> Any:
        self.asked.add(shard.index)
        return super().data(shard)


class Shared(Sound):
    def data(self, shard: Shard) -> Any:
        return super().data(Shard(shard.role, 0, 4))


class Own(Shared):
    own_data = True


class OnItself(Sound):
    def data(self, shard: Shard) -> Any:
        return Examples(X, Y) if shard.role == "test" else super().data(shard)


class Stiff(Synthetic):
    def units(self, model: Any) -> Any:
        return None


class Regression(Sound):
    loss = torch.nn.MSELoss()

    def data(self, shard: Shard) -> Any:
        return X, X[:, :2]


class Scored(Regression):
    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"r2": 0.5}


class Percent(Regression):
    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"accuracy": 83.5}


def test_what_is_frozen_is_told() -> None:
    """4 x 8 float32 that a device fetches once; nothing is said of their standing still."""
    told = {f.about: f.text for f in checked(Fixed())}
    assert told["frozen"] == "128 bytes, which a device fetches once"
    assert not any("did not move" in text for text in told.values())


@pytest.mark.parametrize(
    ("app", "about", "words"),
    [
        (Unmoved(), "training", "0.weight did not move"),
        (Drawn(), "training", "the same task came to another result"),
        (Drawn(), "batched executor", "Drawn has its own train"),
        (Loader(), "attacks", "label_flip"),
        (Loader(), "data", "client.batch_size says nothing"),
        (Shared(), "data", "shards 0 and 1 of 4 are the same examples: let `data` go by shard.index"),
        (OnItself(), "data", "the test part has all that shard 0 trains on"),
        (Scored(), "evaluation", "no accuracy and no loss: run.metric and run.mode must say what counts"),
        (Percent(), "evaluation", "accuracy is a share"),
        (Regression(), "batched executor", "Regression has its own loss"),
        (Stiff(), "sub-models", "numpy arrays needs units"),
    ],
)
def test_what_works_only_in_part_is_a_warning(app: App, about: str, words: str) -> None:
    assert not found(app, "fail")
    told = [f.text for f in checked(app) if (f.level, f.about) == ("warn", about)]
    assert any(words in text for text in told), told


def test_shards_that_stream_are_not_made_to_be_looked_at() -> None:
    """Nothing of them would be seen, and an App may take long for each."""
    app = Heard()
    checked(app)
    assert app.asked == {0, 1}, "the second is compared with the first"


def test_an_app_whose_devices_have_data_of_their_own_may_pass_over_the_shard() -> None:
    assert not any("same examples" in f.text for f in checked(Own()))


class Line(Sound):
    """A model of numpy arrays, of which one is of whole numbers, with batches of its own or as planned."""

    def __init__(self, planned: bool) -> None:
        super().__init__()
        self._planned = planned

    def model(self) -> Any:
        return {"w": np.zeros(4), "seen": np.zeros(1, np.int64), "order": np.arange(4)}

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        for rows in batches(len(examples), plan, seed) if self._planned else [slice(None)]:
            model["w"] += examples.x[rows].mean(0)
            model["seen"] += len(examples.x[rows])
        return {}

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"loss": float(np.abs(model["w"]).sum())}


def test_whole_numbers_that_are_trained_in_vain_are_named() -> None:
    said = found(Line(planned=True), "warn")["training"]
    assert said.startswith("seen: whole numbers stay as they were when the run began")


@pytest.mark.parametrize("planned", [True, False])
def test_who_draws_batches_as_planned_may_train_on(planned: bool) -> None:
    assert ("elastic push" in found(Line(planned), "warn")) is not planned


def test_the_command_says_it_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport anabranch\n"
        "class Mine(anabranch.App):\n"
        "    def model(self): return {'w': np.zeros(3)}\n"
        "    def data(self, shard): return np.ones((4, 3)), np.ones(4)\n"
        "    def train(self, model, examples, plan, seed): model['w'] += 1 / 0\n"
    )
    sound = anabranch(tmp_path, "check", "synthetic", "--json")
    assert sound.returncode == 0, sound.stderr
    *findings, last = map(json.loads, sound.stdout.splitlines())
    assert last == {"kind": "checked", "app": "synthetic"}
    assert {f["level"] for f in findings} == {"ok", "warn"}
    broken = anabranch(tmp_path, "check", "mine.py:Mine")
    assert broken.returncode == 3
    assert "fail training: Mine.train (mine.py:6) on this device: ZeroDivisionError" in broken.stdout
    assert broken.stderr == "error: mine.py:Mine will not work: see training above\n"


def test_the_command_checks_the_app_of_a_file_with_all_that_the_file_sets(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport anabranch\n"
        "class Mine(anabranch.App):\n"
        "    def model(self): return {'w': np.load(self.data_path)}\n"
        "    def data(self, shard): return np.ones((4, 3)), np.ones(4)\n"
        "    def train(self, model, examples, plan, seed): model['w'] += 1.0\n"
        "    def evaluate(self, model, examples): return {'loss': float(len(examples))}\n"
    )
    for name, numbers in (("seven", 7), ("five", 5)):
        np.save(tmp_path / f"{name}.npy", np.zeros(numbers))
    (tmp_path / "run.toml").write_text(
        '[run]\nworkload = "mine.py:Mine"\ndata_path = "seven.npy"\n[fleet]\nclients = 2\n'
    )
    said = anabranch(tmp_path, "check", "run.toml").stdout
    assert "model: 7 numbers" in said, said
    assert "data: shard 0/2" in said, said
    assert said.endswith("mine.py:Mine will work\n"), said
    assert "model: 5 numbers" in anabranch(tmp_path, "check", "run.toml", "--data-path", "five.npy").stdout
    assert anabranch(tmp_path, "check").stderr == (
        "error: name an App, such as digits or path.py:App, the folder of a Flower app by --flower, "
        "or a TOML file\n"
    )


class InTurns(Sound):
    """Adapters whose halves alternate, of which the App says nothing."""

    def model(self) -> Any:
        return lora(super().model(), rank=2, train="alternate")


def test_halves_that_the_run_deals_are_tried_one_by_one() -> None:
    def told(name: str) -> dict[str, str]:
        run = Config(submodel=SubmodelTable(name=name)).to_json()
        return {f.about: f.level + " " + f.text for f in Checkup(InTurns(), run, LocalPlan(), 4)}

    assert told("none")["training"].startswith("fail adapters that alternate: nobody says whose turn")
    found = told("alternate")
    assert {text[:3] for about, text in found.items() if about != "sub-models"} == {"ok "}, found
    assert found["training"].startswith("ok 2 steps")
    assert found["restart"] == "ok trains on from what it kept"


def test_turns_of_which_the_model_has_nothing_are_told() -> None:
    run = Config(submodel=SubmodelTable(name="alternate")).to_json()
    failed = [f for f in Checkup(Sound(), run, LocalPlan(), 4) if f.level == "fail"]
    assert [f.about for f in failed] == ["model"]
    assert "name in submodel.turns a pattern for each turn" in failed[0].text


def test_a_split_that_is_cruder_than_it_says_is_told() -> None:
    """Of each of Synthetic's ten classes there are some thousand rows."""

    def told(shards: int) -> list[str]:
        run = Config(fleet=FleetTable(split="dirichlet", clients=shards)).to_json()
        found = Checkup(Synthetic(), run, LocalPlan(steps=1), shards)
        return [f.text for f in found if f.level == "warn" and f.about == "data"]

    assert told(900) == []
    assert [text.partition(":")[0] for text in told(1050)] == ["fleet.split = 'dirichlet'"]
