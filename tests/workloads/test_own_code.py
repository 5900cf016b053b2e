"""What a user's code raises is one error: where it happened, what it is, and the user's lines alone."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agents import Federation

from anabranch.client.lease import Cancelled
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError, DataError, Unavailable
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.interruption import Interruptions
from anabranch.simulation.run import simulate
from anabranch.support.own_code import on_device, told
from anabranch.support.stop_signals import Terminated
from anabranch.workloads import Examples, Shard, load_app, trainer_for
from anabranch.workloads.app import App, examples_of
from anabranch.workloads.batches import watched
from anabranch.workloads.calls import data_of, settings_of, train
from anabranch.workloads.synthetic import Synthetic

# Line 5 is where it breaks. What breaks is in the place of BROKEN.
MINE = """import anabranch
import numpy as np
import torch
def look_up(word):
    return {"a": 1}[word]
class Mine(anabranch.App):
    def model(self):
        return BROKEN_MODEL or torch.nn.Linear(4, 2)
    def units(self, model):
        BROKEN_UNITS
    def settings(self, seed):
        return BROKEN_SETTINGS or {}
    def data(self, shard):
        x = BROKEN_DATA or np.ones((8, 4), np.float32)
        return anabranch.Examples(x, np.arange(8) % 2)
    def train(self, model, examples, plan, seed):
        BROKEN_TRAIN
        return super().train(model, examples, plan, seed)
    def evaluate(self, model, examples):
        BROKEN_EVALUATE
        return super().evaluate(model, examples)
"""


def mine(folder: Path, broken: str) -> App:
    """The App of a file, in which one method looks a word up that is not there."""
    text = MINE.replace(f"BROKEN_{broken}", 'look_up("b")')
    for name in ("MODEL", "UNITS", "SETTINGS", "DATA", "TRAIN", "EVALUATE"):
        text = text.replace(f"BROKEN_{name}", "None")
    (folder / "mine.py").write_text(text)
    return load_app("mine.py:Mine")


def _trained(app: App) -> None:
    trainer = trainer_for(app)
    start = trainer.spec.flatten(trainer.initial(0))
    trainer.train(start, {}, data_of(app, Shard("train")), LocalPlan(), seed=1)


def _evaluated(app: App) -> None:
    trainer = trainer_for(app)
    trainer.evaluate(trainer.spec.flatten(trainer.initial(0)), {}, data_of(app, Shard("test")))


@pytest.mark.parametrize(
    ("broken", "line", "do"),
    [
        ("MODEL", 8, trainer_for),
        ("UNITS", 10, trainer_for),
        ("SETTINGS", 12, lambda app: settings_of(app, 0)),
        ("DATA", 14, lambda app: data_of(app, Shard("train", 2, 5))),
        ("TRAIN", 17, _trained),
        ("EVALUATE", 20, _evaluated),
    ],
)
def test_each_method_is_named_with_file_and_line(
    broken: str, line: int, do: Callable[[App], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = mine(tmp_path, broken)
    with on_device("device-0003"), pytest.raises(AppError) as caught:
        do(app)
    first, *lines = str(caught.value).splitlines()
    method = broken.lower()
    about = " for shard 2/5" if method == "data" else ""
    assert first == f"Mine.{method}{about} (mine.py:5) on device-0003: KeyError: 'b'"
    assert lines[0] == f"  mine.py:{line} in {method}"
    assert lines[2:] == ["  mine.py:5 in look_up", '    return {"a": 1}[word]']


@pytest.mark.parametrize("found", [["client"], {"client": 3}])
def test_settings_are_tables(found: Any) -> None:
    class Odd(Synthetic):
        def settings(self, seed: int) -> Any:
            return found

    with pytest.raises(AppError, match=r"Odd\.settings: returned a (list|dict): return a dict of tables"):
        settings_of(Odd(), 0)


LOADED = """import anabranch
import torch
class Photographs(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        try:
            return {"a": 1}[i]
        except KeyError:
            raise OSError(5, "no such\\n  photograph")
class Mine(anabranch.App):
    def model(self):
        return torch.nn.Linear(4, 2)
    def data(self, shard):
        return torch.utils.data.DataLoader(Photographs(), num_workers=1)
    def train(self, model, examples, plan, seed):
        for x, y in examples:
            pass
"""


def test_what_a_process_of_a_loader_raises_is_named_by_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch puts the traceback of that process, most of it its own code, into the message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOADED)
    with on_device("device-0003"), pytest.raises(AppError) as caught:
        _trained(load_app("mine.py:Mine"))
    assert str(caught.value).splitlines() == [
        "Mine.train (mine.py:10) on device-0003: OSError: [Errno 5] no such",
        "  photograph",
        "  mine.py:17 in train",
        "    for x, y in examples:",
        "  mine.py:10 in __getitem__",
        '    raise OSError(5, "no such\\n  photograph")',
    ]


class Drawn(App):
    """Another size each time that it is built, of arrays or of torch."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__()
        self._sizes = iter(range(2, 20))
        self._of_torch = of_torch

    def model(self) -> Any:
        size = next(self._sizes)
        return torch.nn.Linear(4, size, bias=False) if self._of_torch else {"weight": np.ones((size, 4))}

    def data(self, shard: Shard) -> Examples:
        return Examples(np.ones((8, 4), np.float32), np.arange(8) % 2)


@pytest.mark.parametrize("of_torch", [True, False])
def test_a_model_that_is_another_each_time_is_named(of_torch: bool) -> None:
    trainer = trainer_for(Drawn(of_torch))
    had = re.escape(str(trainer.spec.tensors[0].shape))
    with pytest.raises(
        AppError, match=rf"^Drawn: model\(\) must build .*weight has shape .*, and had {had};"
    ):
        trainer.initial(0)


@pytest.mark.parametrize("executor", ["serial", "batched"])
def test_a_simulation_names_the_device(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine(tmp_path, "TRAIN")
    with pytest.raises(AppError, match=r"^Mine\.train \(mine\.py:5\) on device-000\d: KeyError: 'b'\n"):
        simulate(fleet("mine.py:Mine", executor))


def fleet(workload: str, executor: str = "serial") -> Config:
    tables = {
        "run": {"workload": workload, "updates_max": 4},
        "fleet": {"clients": 3, "executor": executor},
        "client": {"steps": 2},
    }
    return merge([("test", tables)])


class OneBad(App):
    """The labels of one device are of no class."""

    def model(self) -> Any:
        return torch.nn.Linear(4, 2)

    def data(self, shard: Shard) -> Examples:
        bad = shard.role == "train" and shard.index == 1
        return Examples(np.ones((8, 4), np.float32), np.full(8, 7 if bad else 1))


def test_in_a_stack_the_device_is_found(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"^OneBad\.train on device-0001: IndexError: .* y is \(8,\) int64"):
        simulate(fleet("unused", "batched"), app=OneBad())


class Fails(Synthetic):
    """Its third training fails."""

    tasks = 0

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        self.tasks += 1
        if self.tasks == 3:
            raise ValueError("a mistake")
        return super().train(model, examples, plan, seed)


def test_what_an_installed_package_lacks_is_not_to_be_installed() -> None:
    """What brings it is there: another release of it has the module."""
    first, *_ = told("mine", _importing("numpy.no_such_part")).splitlines()
    assert first.endswith(f": numpy {np.__version__}, which is installed, has no such module")
    first, *_ = told("mine", _importing("no_such_package.part")).splitlines()
    assert first.endswith("No module named 'no_such_package': install it")


def _importing(module: str) -> ModuleNotFoundError:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    return caught.value


def test_a_live_device_gives_its_task_back_and_ends(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    with pytest.raises(AppError, match=r"^Fails\.train \(.*test_own_code\.py:\d+\) on a: ValueError: a mist"):
        federation.agent(app=Fails(), tasks_max=0).run()
    assert federation.server.engine.version == 2
    assert federation.server.engine.ledger.live_of("a") == [], "nobody waits for its lease"


def test_what_ends_a_training_from_outside_goes_through() -> None:
    class Stubborn(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            try:
                end()
            except Exception as error:
                raise ValueError("eaten") from error
            return {}

    def end() -> None:
        raise ending

    for ending in (Cancelled(), KeyboardInterrupt()):
        with pytest.raises(type(ending)):
            _trained(Stubborn())


def test_errors_raised_on_purpose_keep_their_kind() -> None:
    class Absent(Synthetic):
        def data(self, shard: Shard) -> Examples:
            raise error

    for error, words in (
        (DataError("get it"), r"for shard 0/1 \(.*\.py:\d+\): get it"),
        (Unavailable("no"), "no"),
    ):
        with pytest.raises(type(error), match=words):
            data_of(Absent(), Shard("train"))


def test_an_app_that_leaves_the_program_is_named() -> None:
    class Leaves(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            raise SystemExit(3)

    with pytest.raises(AppError, match=r"Leaves\.train .*: SystemExit: 3"):
        _trained(Leaves())


def test_a_signal_that_comes_while_an_app_works_is_not_the_apps() -> None:
    class Interrupted(Synthetic):
        def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model, examples)

    with pytest.raises(Terminated), Interruptions():
        _evaluated(Interrupted())


def test_what_a_hook_raises_between_two_steps_is_not_the_apps() -> None:
    class Greedy(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            try:
                return super().train(model, examples, plan, seed)
            except Exception:  # noqa: BLE001 - as people write it
                return {}

    def break_down() -> None:
        raise ZeroDivisionError("a bug elsewhere")

    with pytest.raises(ZeroDivisionError, match="a bug elsewhere"), watched(break_down):
        _trained(Greedy())


# --- what data may return ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [0, 1]),
        (((1.0, 2.0), (3.0, 4.0)), (0, 1)),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), torch.tensor([0, 1])),
        (np.array([[1.0, 2.0], [3.0, 4.0]]), [0, 1]),
    ],
)
def test_what_is_as_good_as_arrays_becomes_arrays(x: Any, y: Any) -> None:
    for found in (Examples(x, y), examples_of((x, y)), examples_of([x, y])):
        assert isinstance(found.x, np.ndarray)
        assert found.x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert found.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, r"data returned a NoneType: return Examples\(x, y\)"),
        ({"x": [1], "y": [2]}, "data returned a dict"),
        ((1, 2, 3), "data returned a tuple of 3"),
        (([[1], [2, 3]], [0, 1]), "x is a list that is no array"),
        ((["a", "b"], [0, 1]), "x is a list of text"),
        (([None, 3], [0, 1]), "x is a list of unequal rows or of NoneTypes"),
        (
            ({"ids": [[1], [2]], "mask": [[1], [1]]}, [0, 1]),
            "x is a dict, .*: .* a torch Dataset of pairs whose",
        ),
        (([0, 1], UserDict(y=[0, 1])), "y is a UserDict, "),
        ((3.0, 4.0), "x is one float"),
    ],
)
def test_what_is_not_is_named_at_once(found: Any, words: str) -> None:
    class Given(Synthetic):
        def data(self, shard: Shard) -> Any:
            return found

    with pytest.raises(DataError, match=rf"Given\.data for the test part.*: .*{words}"):
        data_of(Given(), Shard("test"))


FORKING = """
import os, sys
from anabranch.support.own_code import own_code
LEAVING = [lambda: sys.exit(3), lambda: sys.exit("no room"), lambda: None, lambda: 1 / 0]
class Mine: pass
for leave in LEAVING:
    with own_code(Mine(), "train"):
        if (child := os.fork()):
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            leave()
"""


def test_a_process_that_an_app_forks_ends_where_it_leaves_the_app() -> None:
    """Otherwise two would go on with one run: what the child left by was told as an error of the App's."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["3", "1", "0", "1"]
    assert done.returncode == 0
    assert "no room\n" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_seed_of_too_many_bits_is_explained_at_the_users_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames below it are a compiled library's, which bear the names of files that are not here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.replace("BROKEN_TRAIN", "np.random.seed(seed)"))
    app = load_app("mine.py:Mine")
    with pytest.raises(AppError) as caught:
        train(app, None, Examples(np.ones((8, 4)), np.zeros(8)), LocalPlan(), seed=1 << 40)
    said = "Seed must be between 0 and 2**32 - 1: seeds have 63 bits; give it seed % 2**32"
    assert str(caught.value).splitlines() == [
        f"Mine.train (mine.py:17): ValueError: {said}",
        "  mine.py:17 in train",
        "    np.random.seed(seed)",
    ]
