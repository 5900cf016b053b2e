"""A `Trainer` of Hugging Face's becomes a device by one callback."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outages import counted, outage
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import anabranch as ab
from anabranch.core.errors import ConfigError
from anabranch.support.code import load

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

# With random weights: nothing is downloaded.
MODEL = """
from transformers import BertConfig, BertForSequenceClassification


def make_model():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
"""


def sentences(count: int) -> list[dict[str, Any]]:
    """Words, and whether there is a 1 among them."""
    draws = np.random.default_rng(0)
    words = draws.integers(1, 10, (count, 6))
    return [{"input_ids": w, "labels": int(1 in w)} for w in words]


class Line(torch.nn.Module):
    """A linear regression, which computes its loss as models of Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 1)
        with torch.no_grad():
            self.out.weight.copy_(torch.tensor([[0.5, -0.5, 1.0]]))
            self.out.bias.zero_()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(x).squeeze(1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


X = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
Y = (X @ np.array([1, 2, 3], np.float32)).astype(np.float32)
POINTS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Quiet ones, on a CPU."""
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=str(folder / "trained"), **{**quiet, **more})


class Observer(TrainerCallback):
    """What the optimizer is at each step, and what the server has when a task begins."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.remembers: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.remembers.append(bool(optimizer.state_dict()["state"]))


class Calls(TrainerCallback):
    """Does something in the midst of a step's training."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


@pytest.mark.parametrize("guarded", [False, True], ids=["in the clear", "with mutual TLS"])
def test_the_server_is_killed_and_comes_back(guarded: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    with outage(tmp_path, "mine.py:make_model", updates=6, guarded="bert-0" * guarded) as server:
        mine: Any = server.papers or {"id": "bert-0"}
        device = ab.TransformersCallback(server.address, state_dir=tmp_path / "device", **mine)
        trainer = Trainer(
            load(f"{tmp_path}/mine.py:make_model")(),
            arguments(tmp_path, num_train_epochs=1, per_device_train_batch_size=16),
            train_dataset=sentences(64),
            callbacks=[Calls(10, server.kill), device],  # in the third task
        )
        trainer.train()
    assert device.summary is not None
    assert (device.summary.applied, device.summary.run_ended) == (6, True)
    assert trainer.state.global_step == 6 * 4, "a task is an epoch, each trained once"
    assert counted(tmp_path) == {"bert-0": 6}


def by_hand(tasks: int, steps: int, rate: float) -> dict[str, Any]:
    """Plain gradient descent on all points, with a linear schedule that begins anew with each task."""
    model = Line()
    x, y = torch.tensor(X), torch.tensor(Y)
    for _ in range(tasks):
        for step in range(steps):
            model.zero_grad()
            model(x, y)["loss"].backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=rate * (1 - step / steps))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def local_run(tmp_path: Path, updates: int, extra: Any = (), **more: Any) -> tuple[Any, Any, Any]:
    """A trainer on a server in this process, from `Line`, on all points at a time."""
    strategy = more.pop("strategy", ab.strategies.FedAvg(clients_per_round=1))
    options, trains = more.pop("options", {}), more.pop("trains", 1)
    data, resumed, given = (more.pop(name, None) for name in ("eval_dataset", "resumed", "optimizers"))
    points = more.pop("train_dataset", POINTS)
    model = given[0] if given else Line()
    with ab.Server.local(Line(), strategy=strategy, until=ab.Until(updates=updates)) as server:
        device = ab.TransformersCallback(server, id="line", **options)
        args = arguments(
            tmp_path,
            **{"per_device_train_batch_size": 8, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}
            | more,
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=points,
            eval_dataset=data,
            callbacks=[device, *extra],
            optimizers=given[1:] if given else (None, None),
        )
        for _ in range(trains):
            trainer.train(resume_from_checkpoint=resumed)
    return server, trainer, device


def test_a_task_is_what_the_arguments_say_from_the_runs_weights(tmp_path: Path) -> None:
    server, trainer, device = local_run(tmp_path, updates=3, num_train_epochs=4)
    assert device.summary.applied == 3
    assert trainer.state.global_step == 12
    expected = by_hand(tasks=3, steps=4, rate=0.1)
    for name, array in server.weights().items():
        assert np.allclose(array, expected[name], atol=1e-6), name
    pushed = [record for record in server.local.journal if "payload" in record]
    assert [(r["examples"], r["local_steps"]) for r in pushed] == [(8, 4)] * 3
    losses = [r["metrics"]["loss"] for r in pushed]
    assert losses == sorted(losses, reverse=True)


class Unnumbered(IterableDataset[Any]):
    """Points that do not say how many they are."""

    def __iter__(self) -> Any:
        return iter(POINTS)


def test_data_without_a_length_begin_anew_where_they_end(tmp_path: Path) -> None:
    """A pass is a step here, or half of one: a task is four of them."""
    for accumulated in (1, 2):
        server, trainer, device = local_run(
            tmp_path / str(accumulated),
            updates=3,
            train_dataset=Unnumbered(),
            max_steps=4,
            gradient_accumulation_steps=accumulated,
        )
        assert (device.summary.applied, trainer.state.global_step) == (3, 12)
        expected = by_hand(tasks=3, steps=4, rate=0.1)
        for name, array in server.weights().items():
            assert np.allclose(array, expected[name], atol=1e-6), name


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_optimizer_remembers_is_of_one_task(keep: bool, tmp_path: Path) -> None:
    seen = Observer()
    options = {"steps": 3, "keep_optimizer": keep}
    local_run(tmp_path, 4, [seen], options=options, optim="adamw_torch", num_train_epochs=99)
    decay = [0.1, 0.1 * 2 / 3, 0.1 / 3]
    assert len(seen.rates) == 12
    if keep:
        assert seen.remembers == [False] + [True] * 11
        assert seen.rates[:3] == pytest.approx(decay)
        assert seen.rates[3:] == [0.0] * 9, "the schedule has come to its end"
    else:
        assert seen.remembers == [False, True, True] * 4
        assert seen.rates == pytest.approx(decay * 4)


def of_ones_own(schedule: bool) -> tuple[Any, Any, Any]:
    """A model, and what a script may give a trainer with it."""
    model = Line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if schedule else None


MEASURED = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": POINTS}
REMEMBERING: dict[str, Any] = {
    "adam": lambda: {"optim": "adamw_torch"},
    "adagrad": lambda: {"optim": "adagrad"},  # remembers something before its first step
    "by what is measured": lambda: {"optim": "sgd", "lr_scheduler_type": "reduce_lr_on_plateau", **MEASURED},
    "its own optimizer": lambda: {"optimizers": of_ones_own(schedule=False)},
    "its own schedule, too": lambda: {"optimizers": of_ones_own(schedule=True)},
}


@pytest.mark.parametrize("of", REMEMBERING)
def test_a_script_that_resumes_its_checkpoint_trains_as_one_that_does_not(of: str, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "lr_scheduler_kwargs": {}}
    if of == "by what is measured":
        saved |= {"lr_scheduler_kwargs": {"patience": 0, "threshold": 1e9}}  # nothing is ever better
    local_run(tmp_path, 2, **saved, **REMEMBERING[of]())
    resumed, trainer, _ = local_run(tmp_path, 2, resumed=True, **saved, **REMEMBERING[of]())
    assert trainer.state.global_step == 12, "it was resumed"
    plain, _, _ = local_run(tmp_path / "plain", 2, **saved, **REMEMBERING[of]())
    for name, array in plain.weights().items():
        assert np.allclose(resumed.weights()[name], array, atol=1e-6), name


def test_one_trainer_may_train_more_than_once(tmp_path: Path) -> None:
    given = {"optim": "adamw_torch", "max_steps": 3}
    once, _, _ = local_run(tmp_path, 2, **given)
    twice, _, device = local_run(tmp_path, 2, trains=2, options={"tasks_max": 1}, **given)
    assert device.summary.applied == 1
    for name, array in once.weights().items():
        assert np.allclose(twice.weights()[name], array, atol=1e-6), name


def test_what_is_kept_is_kept_by_a_script_that_resumes(tmp_path: Path) -> None:
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "options": {"keep_optimizer": True}}
    local_run(tmp_path, 1, optim="adamw_torch", **given)
    seen = Observer()
    checkpoint = str(tmp_path / "trained" / "checkpoint-2")
    local_run(tmp_path, 1, [seen], optim="adamw_torch", resumed=checkpoint, **given)
    assert seen.remembers == [True] * 4
    assert seen.rates == pytest.approx([0.05, 0.025, 0.0, 0.0]), "on from its third step"


def test_an_optimizer_that_cannot_begin_anew_is_refused(tmp_path: Path) -> None:
    class Unusual(torch.optim.SGD):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1, momentum=0.9)

    class Mine(Trainer):
        optimizer: Any

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = self.optimizer or Unusual(self.model)
            return self.optimizer

    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    with ab.Server.local(Line(), strategy="fedasync") as server:
        for resumed in (None, True):
            device = ab.TransformersCallback(server, id="line", tasks_max=1)
            trainer = Mine(Line(), arguments(tmp_path, **saved), train_dataset=POINTS, callbacks=[device])
            with pytest.raises(ConfigError, match="Unusual remembers an") if resumed else nullcontext():
                trainer.train(resume_from_checkpoint=resumed)


def test_a_warm_up_is_a_part_of_a_task(tmp_path: Path) -> None:
    seen = Observer()
    local_run(tmp_path, 2, [seen], max_steps=4, warmup_steps=2)
    assert seen.rates == pytest.approx([0.0, 0.05, 0.1, 0.05] * 2)


def test_what_is_evaluated_is_sent_along_before_the_next_task(tmp_path: Path) -> None:
    class Weights(TrainerCallback):
        """The model when it is evaluated."""

        seen: list[float]

        def __init__(self) -> None:
            self.seen = []

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append(given["model"].out.bias.item())

    for how in ({"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 2}):
        seen = Weights()
        server, _, _ = local_run(
            tmp_path, 3, [seen], num_train_epochs=2, eval_dataset=POINTS, save_strategy="no", **how
        )
        pushed = [record for record in server.local.journal if "payload" in record]
        assert all("eval_loss" in r["metrics"] for r in pushed), how
        assert seen.seen[-1] == pytest.approx(float(server.weights()["out.bias"][0])), "of what was trained"


def test_the_bar_counts_without_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = {"num_train_epochs": 2, "save_strategy": "epoch", "disable_tqdm": False}
    _, trainer, _ = local_run(tmp_path, 2, **steps)
    shown = capfd.readouterr().err
    assert "4it [" in shown
    assert "/9007199254740992" not in shown
    saved = sorted((tmp_path / "trained").glob("checkpoint-*/trainer_state.json"))
    assert [json.loads(file.read_text())["max_steps"] for file in saved] == [trainer.args.max_steps] * len(
        saved
    )
    assert saved


def test_a_proximal_term_pulls_to_the_runs_weights(tmp_path: Path) -> None:
    free, _, _ = local_run(tmp_path, 1, max_steps=20, strategy="fedasync")
    prox = ab.strategies.FedProx(clients_per_round=1, mu=5.0)
    held, _, _ = local_run(tmp_path, 1, max_steps=20, strategy=prox)
    start = Line().out.weight.detach().numpy()
    moved = [np.linalg.norm(server.weights()["out.weight"] - start) for server in (free, held)]
    assert moved[1] < 0.5 * moved[0]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        ab.TransformersCallback("127.0.0.1:1", epochs=1, steps=2)
    with pytest.raises(TypeError, match="did you mean 'state_dir'"):  # not once it has begun to train
        ab.TransformersCallback("127.0.0.1:1", state_dri="here")  # type: ignore[call-arg]
    with ab.Server.local(Line(), strategy="fedasync") as server:
        device = ab.TransformersCallback(server, id="a")
        late = Trainer(Line(), arguments(tmp_path, max_steps=1), train_dataset=POINTS)
        late.add_callback(device)
        with pytest.raises(ConfigError, match="when that is made"):
            late.train()
        args = arguments(tmp_path, max_steps=1)
        Trainer(Line(), args, train_dataset=POINTS, callbacks=[device])
        with pytest.raises(ConfigError, match="another trainer's"):
            Trainer(Line(), args, train_dataset=POINTS, callbacks=[ab.TransformersCallback(server)])
