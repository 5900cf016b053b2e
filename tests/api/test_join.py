"""A training script becomes a device by a few lines, and outlives its server."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import anabranch, killable
from ports import free_port

import anabranch as ab
from anabranch.api import joining
from anabranch.core.errors import AppError, ConfigError, ManifestMismatch
from scripts import EXAMPLES, changed, losses

LONG_S = 600.0


def ones() -> Any:
    """A model without data: what a server starts from where scripts train."""
    return {"w": np.ones(3), "b": np.zeros(1, np.float32)}


def test_the_model_has_the_version_and_what_is_pushed_counts() -> None:
    model: dict[str, Any] = {"w": np.zeros(3), "b": np.zeros(1, np.float32)}
    with ab.Server.local(ones, strategy=ab.strategies.FedAvg(clients_per_round=1)) as server:
        fed, seen = ab.join(server, model, id="script", tasks_max=4), []
        for task in fed:
            seen.append((task.version, model["w"].tolist()))
            model["w"] *= 2
            fed.push(examples=7, metrics={"loss": np.float32(0.5), "norm": torch.tensor(2.0)}, steps=3)
            model["w"] *= 100  # what was pushed is as it was
    assert seen == [(n, [2.0**n] * 3) for n in range(4)]
    assert server.weights()["w"].tolist() == [16.0] * 3
    assert fed.summary is not None
    assert (fed.summary.applied, fed.summary.why) == (4, "4 tasks done")
    pushed = [record for record in server.local.journal if "payload" in record]
    assert [(r["examples"], r["local_steps"], r["metrics"]["norm"]) for r in pushed] == [(7, 3, 2.0)] * 4


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("w", np.zeros(4), r"'w' is \(4,\), and was \(3,\)"),
        ("w", None, r"'w' is not there, and was \(3,\)"),
        ("more", np.zeros(2), r"'more' is \(2,\), and was not there"),
    ],
)
def test_a_model_keeps_its_form(name: str, tensor: Any, told: str) -> None:
    model = ones()
    with ab.Server.local(ones) as server, ab.join(server, model, id="script") as fed:
        next(iter(fed))
        model[name] = tensor
        if tensor is None:
            del model[name]
        with pytest.raises(ConfigError, match=told):
            fed.push(examples=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda m: setattr(m, "weight", torch.nn.Parameter(torch.zeros(3, 4))),
            r"'weight' is \(3, 4\), and was \(2, 4\)",
        ),
        (
            lambda m: setattr(m, "more", torch.nn.Parameter(torch.zeros(3))),
            r"'more' is \(3,\), and was not there",
        ),
    ],
)
def test_a_model_keeps_its_form_between_tasks_too(change: Callable[[Any], None], told: str) -> None:
    """It is no sub-model of the run's."""
    model = torch.nn.Linear(4, 2)
    server = ab.Server.local(torch.nn.Linear(4, 2), strategy=ab.strategies.FedAvg(clients_per_round=1))
    with server, ab.join(server, model, id="script") as fed:
        tasks = iter(fed)
        next(tasks)
        fed.push(examples=1)
        change(model)
        with pytest.raises(ConfigError, match=f"the next task: the model's tensor {told}"):
            next(tasks)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"examples": math.nan}, r"push\(examples=nan\): give at least 1"),
        ({"examples": math.inf}, r"push\(examples=inf\)"),
        ({"steps": -1}, r"push\(steps=...\): there were -1.0"),
        ({"steps": math.nan}, r"push\(steps=...\): there were nan"),
        ({"steps": "many"}, r"push\(steps=...\): it is 'many', and no number"),
        ({"metrics": {"steps": -2}}, r"push\(metrics=...\): there were -2.0 steps"),
        ({"metrics": {"version": 1}}, r"push\(metrics=...\): the name of metric 'version' must be another"),
        ({"metrics": {"x" * 65: 1}}, "must have 1 to 64 characters"),
        ({"metrics": {f"m{n}": n for n in range(62)}}, "62 metrics, and 61 is the most"),
        ({"metrics": {"loss": 10**400}}, "'loss' is 1000.*, and no number"),
    ],
)
def test_what_no_device_can_send_is_refused_at_once(given: dict[str, Any], told: str) -> None:
    """The device would end by it; here it is pushed again, with all that there may be."""
    model, most = ones(), {f"m{n}": 1.0 for n in range(61)}
    with ab.Server.local(ones, strategy=ab.strategies.FedAvg(clients_per_round=1)) as server:
        fed = ab.join(server, model, id="script", tasks_max=1)
        for _ in fed:
            with pytest.raises(ConfigError, match=told):
                fed.push(**{"examples": 1, **given})
            fed.push(examples=1, metrics=most, steps=1)
    assert fed.summary is not None
    assert fed.summary.applied == 1


def test_a_list_in_the_place_of_an_array_counts_and_a_metric_that_is_no_number_is_named() -> None:
    model: dict[str, Any] = ones()
    with ab.Server.local(ones, strategy=ab.strategies.FedAvg(clients_per_round=1)) as server:
        fed = ab.join(server, model, id="script", tasks_max=2)
        for task in fed:
            assert model["w"].tolist() == [1.0 + task.version] * 3
            model["w"] = [2.0 + task.version] * 3
            with pytest.raises(ConfigError, match="'loss' is 'low', and no number"):
                fed.push(examples=1, metrics={"loss": "low"})
            fed.push(examples=1)
    assert server.weights()["w"].tolist() == [3.0] * 3


class Net(torch.nn.Module):
    """With a buffer, and a parameter that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(x))
        return found


def test_a_torch_model_learns_in_the_scripts_own_loop_and_keeps_its_optimizer() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(200, 4)
    y = (x[:, 0] > 0).long()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    with ab.Server.local(Net(), strategy="fedasync", until=ab.Until(updates=12)) as server:
        fed = ab.join(server, model, id="script")
        for _ in fed:
            for _ in range(5):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
            fed.push(examples=len(x), metrics={"loss": loss})
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert server.weights()["norm.running_mean"].any()


@pytest.mark.parametrize("cast_later", [False, True], ids=["joins in bfloat16", "is cast once it has joined"])
def test_of_a_model_in_bfloat16_what_is_trained_is_what_changes(cast_later: bool) -> None:
    """What it rounds off as it takes the run's weights over is no update: layer 1 stays to the last bit."""
    torch.manual_seed(0)
    served: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    first, model = (
        {name: tensor.clone() for name, tensor in served.state_dict().items()},
        copy.deepcopy(served),
    )
    strategy, until = ab.strategies.FedAvg(clients_per_round=1), ab.Until(updates=3)
    with ab.Server.local(served, strategy=strategy, until=until) as server:
        fed = ab.join(server, model if cast_later else model.bfloat16(), id="short")
        model.bfloat16()
        for _ in fed:
            model[0].weight.data.zero_()
            fed.push(examples=1)
        found = server.weights()
    assert np.abs(found["0.weight"]).max() < 2**-7 * first["0.weight"].abs().max()
    assert all(np.array_equal(found[name], first[name]) for name in ("0.bias", "1.weight", "1.bias"))


def test_of_a_task_of_some_layers_the_others_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    optimizer, x = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.ones(5, 4),
    )
    settings, moved = {"submodel.name": "fragments", "submodel.parts": 2}, []
    until = ab.Until(updates=4)
    with ab.Server.local(model, strategy="fedasync", settings=settings, until=until) as server:
        for _ in (fed := ab.join(server, model, id="script")):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for _ in range(3):
                model(x).square().sum().backward()
                optimizer.step()
            after = model.state_dict()
            moved.append({name for name, tensor in before.items() if not torch.equal(tensor, after[name])})
            fed.push(examples=1)
    assert sorted(map(sorted, moved)) == 2 * [["0.weight"]] + 2 * [["1.bias", "1.weight"]]
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]


@pytest.mark.parametrize("part", [False, True], ids=["frozen", "another part's turn"])
def test_a_change_of_what_is_not_trained_is_refused_and_lost_by_none(part: bool) -> None:
    """As of a layer that is unfrozen in the middle, or of a momentum encoder that is a part of the model."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[1].requires_grad_(part)
    settings = {"submodel.name": "fragments", "submodel.parts": 2} if part else {}
    until = ab.Until(updates=1)
    with ab.Server.local(model, strategy="fedasync", settings=settings, until=until) as server:
        for _ in (fed := ab.join(server, model, id="script")):
            still, trained = (model[0], model[1]) if part else (model[1], model[0])
            trained.bias.data.add_(1)
            kept = still.bias.detach().clone()
            still.bias.data.add_(1)
            with pytest.raises(ConfigError, match=f"'{int(not part)}.bias' has changed, and the task trains"):
                fed.push(examples=1)
            still.bias.data.copy_(kept)
            fed.push(examples=1)
    assert server.version == 1


def test_what_is_frozen_in_the_loop_alone_may_be_trained_later() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer, until = torch.optim.SGD(model.parameters(), lr=0.1), ab.Until(updates=4)
    strategy, moved = ab.strategies.FedAvg(clients_per_round=1), []
    with ab.Server.local(model, strategy=strategy, until=until) as server:
        for task in (fed := ab.join(server, model, id="script")):
            model[0].requires_grad_(task.version >= 2)
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            model(torch.ones(5, 4)).square().sum().backward()
            optimizer.step()
            moved.append(not before.equal(model[0].weight))
            fed.push(examples=1)
        assert np.allclose(server.weights()["0.weight"], model[0].weight.detach(), atol=1e-6)
    assert moved == [False, False, True, True]


def test_for_a_device_that_trains_on_a_pass_of_the_script_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: what is exchanged is what was pushed, and what is merged is in the next pass."""
    monkeypatch.setattr(joining, "LOOK_S", 0.001)
    strategy = ab.strategies.FedAsync(alpha=0.5, staleness={"name": "constant"})
    settings = {"client.push": "elastic", "client.push_steps": 1, "client.merge_weight": 0.5}
    model: dict[str, Any] = ones()
    passes, versions, pulled = 0, [0], []
    with ab.Server.local(ones, strategy=strategy, settings=settings, until=ab.Until(updates=20)) as server:
        for task in (fed := ab.join(server, model, id="script")):
            assert versions[-1] <= task.version <= server.version <= passes
            versions.append(task.version)
            pulled.append(1 + passes - model["w"][0])  # towards the server's, which is behind
            np.linalg.svd(np.ones((100, 100)))
            model["w"] += 1
            passes += 1
            fed.push(examples=1)
    assert pulled[0] == 0 < pulled[-1]
    assert versions[-1] > 0


def test_a_loop_is_left_early_and_its_task_goes_to_another() -> None:
    model = ones()
    settings = {"server.concurrency": 1}
    with ab.Server.local(ones, strategy="fedasync", settings=settings, until=ab.Until(updates=2)) as server:
        with ab.join(server, model, id="first") as fed:
            for _task in fed:
                break
        assert fed.summary is not None
        assert fed.summary.answered == 0
        for _task in (second := ab.join(server, model, id="second")):
            second.push(examples=1)
    assert server.version == 2


LEAVING = """
import sys
import numpy as np
import anabranch as ab

def script():
    model = {"w": np.zeros(500_000, np.float32)}
    for _ in (fed := ab.join(sys.argv[1], model, id="leaving", state_dir=sys.argv[2])):
        model["w"] += 1
        fed.push(examples=1)
        END

script()
"""


@pytest.mark.parametrize("end", ["break", "sys.exit()", "raise SystemExit('enough')", "fed.close(); break"])
def test_what_was_pushed_by_a_script_that_ends_is_kept_and_counts(end: str, tmp_path: Path) -> None:
    model = {"w": np.zeros(500_000, np.float32)}
    strategy, until = ab.strategies.FedAvg(clients_per_round=1), ab.Until(updates=1)
    with ab.Server(dict(model), strategy=strategy, until=until) as server:
        command = [sys.executable, "-c", LEAVING.replace("END", end), server.address, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
        assert ended.stderr.replace("enough\n", "") == ""
        fed = ab.join(server, model, id="leaving", state_dir=tmp_path)
        assert [task.version for task in fed] == []
        assert server.weights()["w"].tolist()[:2] == [1.0, 1.0]


@pytest.mark.parametrize("way", ["task", "overlap"])
def test_what_was_pushed_by_a_script_that_is_killed_at_once_counts_once(way: str, tmp_path: Path) -> None:
    """By SIGKILL, which nothing of the process outlives, as soon as `push` has returned."""
    model, settings = {"w": np.zeros(500_000, np.float32)}, {"client.push": way, "server.tasks_per_client": 2}
    strategy, until = ab.strategies.FedAvg(clients_per_round=1), ab.Until(updates=2)
    code = LEAVING.replace("END", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with ab.Server(dict(model), strategy=strategy, until=until, settings=settings) as server:
        for before in (0, 1):
            command = [sys.executable, "-c", code, server.address, str(tmp_path)]
            killed = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            lines = killed.stderr.splitlines()
            assert len(lines) == before, lines
            assert all("which had it before, was killed" in line for line in lines)
        fed = ab.join(server, model, id="leaving", state_dir=tmp_path)
        assert [task.version for task in fed] == [], "both results were left to be sent"
        assert server.weights()["w"].tolist()[:2] == [2.0, 2.0]
    assert fed.summary is not None
    assert fed.summary.rejected == 0


TOGETHER = """
import os, sys
import torch
import anabranch as ab

server, folder = sys.argv[1:]
rank = int(os.fork() == 0)  # as torchrun starts them, with one import
torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
try:
    for _ in ab.join(server, torch.nn.Linear(2, 1), id=f"rank-{rank}", state_dir=f"{folder}/{rank}"):
        print("got a task", flush=True)
        break
except Exception as error:
    print(error, flush=True)
rank or os.wait()
"""


def test_processes_that_train_one_model_are_no_devices(tmp_path: Path) -> None:
    """They add up gradients, which each would have from the weights of a task of its own."""
    with ab.Server(torch.nn.Linear(2, 1), strategy="fedasync", until=ab.Until(updates=2)) as server:
        command = [sys.executable, "-c", TOGETHER, server.address, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    told = "2 processes train this model, and a device is one"
    assert [line[: len(told)] for line in done.stdout.splitlines()] == [told] * 2, done.stderr


def test_of_a_script_that_forks_nothing_is_printed_that_it_has_not_said(tmp_path: Path) -> None:
    """As of each epoch of a DataLoader's workers: gRPC's own lines are not the script's."""
    fork = "import os; os.fork() or os._exit(0); os.wait()"
    with ab.Server(
        {"w": np.zeros(500_000, np.float32)}, strategy="fedasync", until=ab.Until(updates=3)
    ) as server:
        command = [sys.executable, "-c", LEAVING.replace("END", fork), server.address, str(tmp_path)]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
        done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_who_joins_anew_takes_the_place_of_its_earlier_loop(tmp_path: Path) -> None:
    """A notebook's cell that was interrupted and is run again; the traceback keeps the first loop alive."""
    model, until = ones(), ab.Until(updates=3)
    settings = {"server.concurrency": 1}
    with ab.Server.local(ones, strategy="fedasync", settings=settings, until=until) as server:
        first = ab.join(server, model, id="cell", state_dir=tmp_path)
        tasks = iter(first)
        next(tasks)
        first.push(examples=1)
        next(tasks)  # here it is interrupted
        for _task in (second := ab.join(server, model, id="cell", state_dir=tmp_path)):
            second.push(examples=1)
    assert first.summary is not None
    assert second.summary is not None
    assert (first.summary.why, second.summary.run_ended) == ("the script has left", True)
    assert server.version == 3


def test_what_is_wrong_is_said() -> None:
    model = ones()
    with ab.Server.local(ones, strategy="fedasync") as server:
        with ab.join(server, model, id="a") as fed:
            with pytest.raises(ConfigError, match="there is none at hand"):
                fed.push(examples=1)
            tasks = iter(fed)
            next(tasks)
            with pytest.raises(ConfigError, match="give at least 1"):
                fed.push(examples=0)
            with pytest.raises(ConfigError, match=r"examples=\.\.\.\) is a dict: give on how many examples"):
                fed.push(model)
            with pytest.raises(ConfigError, match=r"metrics=\.\.\.\) is a Tensor: give numbers by name"):
                fed.push(examples=1, metrics=torch.ones(()))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"'loss' is tensor\(\[1\., 1\.\]\), and no number"):
                fed.push(examples=1, metrics={"loss": torch.ones(2)})
            with pytest.raises(ConfigError, match=r"version 0 was not pushed: call push\(examples=\.\.\."):
                next(tasks)
            with pytest.raises(ConfigError, match="joined once"):
                next(iter(fed))
        with pytest.raises(ManifestMismatch, match="another model"):
            next(iter(ab.join(server, {"w": np.ones(2)}, id="b")))
        with pytest.raises(AppError, match=r"the class Linear: give an object of it, Linear\(\.\.\.\)"):
            ab.join(server, torch.nn.Linear, id="c")
        for none in (3, "model", None, [np.ones(2)], lambda: model):
            with pytest.raises(AppError, match=r"model is a \w+: give a torch module, or a dict of numpy"):
                ab.join(server, none, id="c")
        for count in (0, 2.5, "2"):
            with pytest.raises(
                ConfigError, match=rf"join\(examples={count!r}\): give how many this device has"
            ):
                ab.join(server, model, id="c", examples=count)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"server is a dict: give HOST:PORT, or an ab\.Server"):
            ab.join(model, server)


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_in_whose_place_another_is_trained_is_told_once(
    trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = Net()
    with ab.Server.local(Net, strategy="fedasync") as server:
        fed = ab.join(server, given, id="script", tasks_max=3)
        for _ in fed:
            model = given if trained else copy.deepcopy(given)
            with torch.no_grad():
                model.out.bias.add_(1)
            fed.push(examples=4)
    told = [r.getMessage() for r in caplog.records if "is as the task gave it" in r.getMessage()]
    assert len(told) == (not trained)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "module"])  # of torch.compile, which takes long, and others
def test_a_module_in_a_wrapper_of_torchs_is_named(wrapper: str) -> None:
    plain = torch.nn.Linear(2, 2)
    with ab.Server.local(plain, strategy="fedasync", until=ab.Until(updates=1)) as server:
        with pytest.raises(ManifestMismatch, match=f"put '{wrapper}.' into names: give the module that"):
            next(iter(ab.join(server, torch.nn.ModuleDict({wrapper: plain}), id="wrapped")))
        for _task in (fed := ab.join(server, plain, id="plain")):
            fed.push(examples=1)
    assert server.version == 1


def test_the_server_is_killed_and_comes_back(tmp_path: Path) -> None:
    made = anabranch(tmp_path, "init", EXAMPLES / "plain_torch.py:make_model")
    assert made.returncode == 0, made.stderr
    options = ["--updates", 8, "--strategy", "fedasync", "--set", "server.lease_min_s=1"]
    options += ["--address", f"127.0.0.1:{free_port()}", "--admin-address", "127.0.0.1:0"]
    model, versions = (
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)),
        [],
    )
    with killable(tmp_path, *options) as (address, first):
        fed = ab.join(address, model, id="script-0", state_dir=tmp_path / "device")
        tasks = iter(fed)
        for _ in range(3):
            versions.append(next(tasks).version)
            fed.push(examples=5)
        versions.append(next(tasks).version)
        first.send_signal(signal.SIGKILL)
        first.wait(LONG_S)
        fed.push(examples=5)  # nobody hears it
    with killable(tmp_path, *options):
        for task in tasks:
            versions.append(task.version)
            fed.push(examples=5)
    assert versions == list(range(8)), "nothing is lost, and nothing counts twice"
    assert fed.summary is not None
    assert (fed.summary.applied, fed.summary.run_ended) == (8, True)


@pytest.mark.slow
def test_the_script_of_the_examples_is_the_plain_one_with_five_lines_changed(tmp_path: Path) -> None:
    assert len(lines := changed("plain_torch.py", "joined_torch.py")) == 5, lines
    with ab.Server(
        EXAMPLES / "plain_torch.py:make_model", strategy="fedasync", until=ab.Until(updates=4)
    ) as server:
        said = losses("joined_torch.py", server.address, tmp_path)
    assert len(said) == 4
    assert said[-1] < said[0]


@pytest.mark.parametrize("model", [ones(), Net()], ids=["arrays", "torch"])
def test_a_run_without_gradients_is_no_run_of_scripts(model: Any) -> None:
    """They make their own gradients, or nobody knows of what: not one task is handed to them."""
    settings, why = {"client.gradient": "zeroth"}, r"'zeroth' has no loss to call: script has"
    with (
        ab.Server.local(lambda: model, strategy="fedasync", settings=settings) as server,
        pytest.raises(AppError, match=why),
    ):
        next(iter(ab.join(server, model, id="script")))
