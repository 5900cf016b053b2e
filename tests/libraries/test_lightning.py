"""A `Trainer` of Lightning's becomes a device by one callback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from outages import counted, outage
from torch.utils.data import DataLoader, TensorDataset

import anabranch as ab
from anabranch.core.errors import ConfigError

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

MODEL = """
import torch


def make_model():
    return torch.nn.ModuleDict({"out": torch.nn.Linear(3, 1)})
"""

X = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
Y = (X @ np.array([1, 2, 3], np.float32)).astype(np.float32)
POINTS = TensorDataset(torch.tensor(X), torch.tensor(Y))


class Line(lightning.LightningModule):
    """A linear regression; `rates` are those of all steps, `remembers` what the optimizer then had."""

    def __init__(self, optimizer: Any = torch.optim.SGD, schedule: bool = False) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 1)
        with torch.no_grad():
            self.out.weight.copy_(torch.tensor([[0.5, -0.5, 1.0]]))
            self.out.bias.zero_()
        self.make, self.schedule, self.rate = optimizer, schedule, 0.1
        self.rates: list[float] = []
        self.remembers: list[bool] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.out(x).squeeze(1), y)
        self.log("train_mse", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val_mse", torch.nn.functional.mse_loss(self.out(x).squeeze(1), y))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.remembers.append(bool(optimizer.state_dict()["state"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=self.rate)
        if not self.schedule:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}


class Calls(lightning.Callback):
    """Does something after a step of training."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def trainer_of(callbacks: Any, folder: Path | None = None, **more: Any) -> lightning.Trainer:
    """A quiet one, on a CPU."""
    more = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, **more}
    more |= {"default_root_dir": folder, "enable_checkpointing": folder is not None}
    return lightning.Trainer(callbacks=callbacks, accelerator="cpu", **more)


@pytest.mark.parametrize("guarded", [False, True], ids=["in the clear", "with mutual TLS"])
def test_the_server_is_killed_and_comes_back(guarded: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    with outage(tmp_path, "mine.py:make_model", updates=6, guarded="line-0" * guarded) as server:
        mine: Any = server.papers or {"id": "line-0"}
        device = ab.LightningCallback(server.address, state_dir=tmp_path / "device", **mine)
        trainer = trainer_of([Calls(10, server.kill), device], max_epochs=1)  # in the third task
        trainer.fit(Line(), DataLoader(POINTS, batch_size=8))
    assert device.summary is not None
    assert (device.summary.applied, device.summary.run_ended) == (6, True)
    assert trainer.global_step == 6 * 4, "a task is an epoch, each trained once"
    assert counted(tmp_path) == {"line-0": 6}


def by_hand(tasks: int, steps: int, falls: bool) -> dict[str, Any]:
    """Plain gradient descent on all points, with a linear schedule for each task if it `falls`."""
    model = Line()
    for _ in range(tasks):
        for step in range(steps):
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model.out(torch.tensor(X)).squeeze(1), torch.tensor(Y))
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.1 * (1 - step / steps if falls else 1))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def local_run(module: Line, updates: int, callbacks: Any = (), **more: Any) -> tuple[Any, Any, Any]:
    """A trainer on a server in this process, on all points at a time."""
    strategy = more.pop("strategy", ab.strategies.FedAvg(clients_per_round=1))
    options, validation = more.pop("options", {}), more.pop("validation", None)
    fits, checkpoint = more.pop("fits", 1), more.pop("checkpoint", None)
    with ab.Server.local(Line(), strategy=strategy, until=ab.Until(updates=updates)) as server:
        device = ab.LightningCallback(server, id="line", **options)
        trainer = trainer_of([device, *callbacks], **more)
        for _ in range(fits):
            trainer.fit(module, DataLoader(POINTS, batch_size=32), validation, ckpt_path=checkpoint)
    return server, trainer, device


@pytest.mark.parametrize("told", [{"max_epochs": 4}, {"max_steps": 4}], ids=["epochs", "steps"])
@pytest.mark.parametrize("falls", [False, True])
def test_a_task_is_what_the_trainer_was_told_from_the_runs_weights(told: Any, falls: bool) -> None:
    server, trainer, device = local_run(Line(schedule=falls), 3, **told)
    assert device.summary.applied == 3
    assert trainer.global_step == 12
    expected = by_hand(tasks=3, steps=4, falls=falls)
    for name, array in server.weights().items():
        assert np.allclose(array, expected[name], atol=1e-6), name
    pushed = [record for record in server.local.journal if "payload" in record]
    assert [(r["examples"], r["local_steps"]) for r in pushed] == [(32, 4)] * 3
    losses = [r["metrics"]["loss"] for r in pushed]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_optimizer_remembers_is_of_one_task(keep: bool) -> None:
    module = Line(torch.optim.Adam)
    local_run(module, 4, options={"steps": 3, "keep_optimizer": keep}, max_epochs=99)
    assert module.remembers == ([False] + [True] * 11 if keep else [False, True, True] * 4)


@pytest.mark.parametrize("told", [{"max_epochs": 3}, {"max_steps": 3}], ids=["epochs", "steps"])
@pytest.mark.parametrize("saved_at", [4, 6], ids=["midway", "at the end"])
def test_a_script_that_resumes_its_checkpoint_trains_as_one_that_does_not(
    told: Any, saved_at: int, tmp_path: Path
) -> None:
    def module() -> Line:
        return Line(torch.optim.Adam, schedule=True)

    keeping = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    local_run(module(), 2, [keeping], folder=tmp_path, **told)
    resumed = module()
    server, trainer, _ = local_run(resumed, 2, checkpoint=tmp_path / f"step={saved_at}.ckpt", **told)
    assert trainer.global_step == saved_at + 6, "it was resumed"
    assert resumed.remembers == [False, True, True] * 2
    assert resumed.rates == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3] * 2)
    plain, _, _ = local_run(module(), 2, **told)
    for name, array in plain.weights().items():
        assert np.allclose(server.weights()[name], array, atol=1e-6), name


@pytest.mark.parametrize("task", [{"steps": 3}, {"epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("told", [{"max_epochs": 2}, {"max_epochs": 99}, {"max_steps": 99}], ids=str)
def test_a_schedule_spans_a_task_where_the_callback_says_how_long_it_is(task: Any, told: Any) -> None:
    module = Line(schedule=True)
    local_run(module, 2, options=task, **told)
    assert module.rates == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3] * 2)


def test_one_trainer_may_train_more_than_once() -> None:
    module = Line(torch.optim.Adam, schedule=True)
    local_run(module, 2, fits=2, options={"tasks_max": 1}, max_epochs=3)
    assert module.rates == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3] * 2)
    assert module.remembers == [False, True, True] * 2


@pytest.mark.parametrize("is_last", [False, True])
def test_the_rate_that_a_search_has_found_counts(is_last: bool, tmp_path: Path) -> None:
    search = LearningRateFinder(1e-4, num_training_steps=20, attr_name="rate", early_stop_threshold=None)
    module = Line()
    with ab.Server.local(Line(), strategy="fedasync", until=ab.Until(updates=2)) as server:
        device = ab.LightningCallback(server, id="line")
        callbacks = [search, device] if is_last else [device, search]
        trainer_of(callbacks, tmp_path, max_steps=2).fit(module, DataLoader(POINTS, batch_size=32))
    assert search.optimal_lr is not None
    assert module.rates[-4:] == pytest.approx([search.optimal_lr.suggestion()] * 4)


def test_what_is_measured_is_sent_along_and_a_checkpoint_is_of_what_was_trained(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="newest", enable_version_counter=False)
    server, _, _ = local_run(
        Line(), 3, [checkpoint], max_epochs=2, folder=tmp_path, validation=DataLoader(POINTS, batch_size=32)
    )
    pushed = [record for record in server.local.journal if "payload" in record]
    assert [set(r["metrics"]) for r in pushed] == [{"loss", "train_mse", "val_mse", "train_s"}] * 3
    x = torch.tensor(X)
    final = x @ torch.tensor(server.weights()["out.weight"][0]) + torch.tensor(server.weights()["out.bias"])
    assert pushed[-1]["metrics"]["val_mse"] == pytest.approx(float(((final - torch.tensor(Y)) ** 2).mean()))
    saved = Line.load_from_checkpoint(tmp_path / "newest.ckpt")
    assert np.array_equal(saved.out.bias.detach().numpy(), server.weights()["out.bias"])


@pytest.mark.parametrize("told", [{"max_epochs": 2}, {"max_steps": 2}], ids=["epochs", "steps"])
def test_the_bar_says_no_last_epoch(told: Any, capfd: pytest.CaptureFixture[str]) -> None:
    _, trainer, _ = local_run(Line(), 2, [RichProgressBar()], enable_progress_bar=True, **told)
    shown = capfd.readouterr().out
    assert re.search(r"Epoch \d+ ", shown)
    assert not re.search(r"Epoch \d+/", shown)
    assert trainer.max_epochs == -1


def test_a_proximal_term_pulls_to_the_runs_weights() -> None:
    free, _, _ = local_run(Line(), 1, max_steps=20, strategy="fedasync")
    prox = ab.strategies.FedProx(clients_per_round=1, mu=5.0)
    held, _, _ = local_run(Line(), 1, max_steps=20, strategy=prox)
    start = Line().out.weight.detach().numpy()
    moved = [np.linalg.norm(server.weights()["out.weight"] - start) for server in (free, held)]
    assert moved[1] < 0.5 * moved[0]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        ab.LightningCallback("127.0.0.1:1", epochs=1, steps=2)
    with pytest.raises(TypeError, match="did you mean 'state_dir'"):  # not once it has begun to train
        ab.LightningCallback("127.0.0.1:1", state_dri="here")  # type: ignore[call-arg]
    with ab.Server.local(Line(), strategy="fedasync") as server, pytest.raises(ConfigError, match="how long"):
        trainer_of([ab.LightningCallback(server)], max_epochs=-1).fit(Line(), DataLoader(POINTS))


@pytest.mark.parametrize("other", [StochasticWeightAveraging(swa_lrs=0.05), EMAWeightAveraging()])
@pytest.mark.parametrize("is_last", [False, True])
def test_an_average_over_the_training_is_refused_before_it_joins(other: Any, is_last: bool) -> None:
    with ab.Server.local(Line(), strategy="fedasync") as server:
        device = ab.LightningCallback(server, id="line")
        trainer = trainer_of([device, other] if is_last else [other, device], max_epochs=4)
        with pytest.raises(ConfigError, match=f"beside {type(other).__name__}: .*leave it out"):
            trainer.fit(Line(), DataLoader(POINTS, batch_size=32))
    assert device.summary is None
    assert not [record for record in server.local.journal if "payload" in record]
