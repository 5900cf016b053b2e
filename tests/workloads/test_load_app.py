"""Loading Apps by name: what works, and what each mistake is called."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anabranch as ab
from anabranch.core.errors import AppError, DataError
from anabranch.core.model.updates import LocalPlan
from anabranch.support.code import load
from anabranch.workloads import Examples, Shard, load_app, trainer_for
from anabranch.workloads.app import app_of
from anabranch.workloads.calls import arrived_of, join_run, train
from tests.support.app_contract import METHODS, Asked, arguments

OWN_TRAIN = """
import torch
from anabranch.workloads import App, Examples
import neighbour_of_the_app

class App(App):
    def __init__(self, data_path=""):
        super().__init__(data_path)
    def model(self):
        return torch.nn.Linear(3, 2)
    def data(self, shard):
        return Examples(torch.zeros(8, 3).numpy(), torch.zeros(8).long().numpy())
    def train(self, model, examples, plan, seed):
        assert model.training and next(model.parameters()).device == self.runtime.device
        with torch.no_grad():
            model.weight += neighbour_of_the_app.STEP
        return {"loss": 0.5, "steps": 3}

instance = App("from the file")
"""

FUNCTIONS = """
import numpy as np

def model():
    return {"w": np.zeros(2, np.float32), "count": np.zeros(1, np.int64)}
def data(shard):
    return np.ones((4, 2)), np.ones(4)
def train(model, examples, plan, seed):
    model["w"] += len(examples)
    model["count"] += 1
def evaluate(model, examples):
    return {"accuracy": 1.0, "loss": 0.0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_the_app.py").write_text("STEP = 0.25\n")
    path = tmp_path / "mine.py"
    path.write_text(OWN_TRAIN)
    return path


def test_a_file_with_its_own_train(file: Path) -> None:
    app = load_app(f"{file}:App", "some/path")
    assert app.data_path == "some/path"
    trainer = trainer_for(app)
    vector = np.zeros(8, np.float32)
    result = trainer.train(vector, {}, app.data(Shard("train")), LocalPlan(), seed=0)
    np.testing.assert_array_equal(result.delta, [0.25] * 6 + [0] * 2)
    assert result.steps == 3
    assert result.metrics == {"loss": 0.5}


def test_a_file_below_a_folder_that_is_not_named_in_utf_8(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # Ray, in another test, could not go on with such a folder
    below = shutil.copytree(file.parent, file.parent / os.fsdecode(b"gr\xfcn"))
    assert load_app(f"{below / file.name}:App").name == "App"


def test_a_process_that_is_spawned_finds_the_file_of_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "of words" / "my\u00e4pp.v2.py"  # no name that Python would import
    path.parent.mkdir()
    path.write_text("from neighbour import WORDS\n\ndef length_of(row):\n    return len(WORDS[row])\n")
    (path.parent / "neighbour.py").write_text("WORDS = ['a', 'bcd']\n")
    length_of = load(f"{path}:length_of")
    context = multiprocessing.get_context("spawn")  # as workers of a DataLoader's on macOS and Windows
    with ProcessPoolExecutor(1, context) as pool:
        assert list(pool.map(length_of, [0, 1])) == [1, 3]
    assert load(f"{path}:length_of").__module__ == length_of.__module__, "one name for one file"


def test_a_file_that_imports_by_a_dot_is_told_that_it_is_in_no_package(tmp_path: Path) -> None:
    package = tmp_path / "of_dots"
    package.mkdir()
    (package / "words_of_dots.py").write_text("WORDS = 2\n")
    (package / "strict.py").write_text("from .words_of_dots import WORDS\n")
    with pytest.raises(
        AppError, match=r"strict.py:1\): ImportError: .* in no package: import words_of_dots "
    ):
        load(f"{package / 'strict.py'}:WORDS")
    for number, line in enumerate(["from .words_10 import WORDS", "from . import words_10"]):  # as hex, too
        (package / f"strict{number}.py").write_text(f"{line}\n")
        with pytest.raises(AppError, match=r"in no package: import words_10 without the dot"):
            load(f"{package / f'strict{number}.py'}:WORDS")
    dotted, plain = "from .words_of_dots import WORDS", "from words_of_dots import WORDS"
    either = f"try:\n    {dotted}\nexcept ImportError:\n    {plain}\n"
    (package / "either.py").write_text(either)
    assert load(f"{package / 'either.py'}:WORDS") == 2


def test_an_instance_is_used_as_it_is_and_app_is_the_default(file: Path) -> None:
    assert load_app(f"{file}:instance", "ignored").data_path == "from the file"
    assert load_app(str(file)).name == "App"


def test_a_module_with_the_functions_is_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app_of_functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    for spec in ("app_of_functions", "app_of_functions.py", f"{tmp_path}/app_of_functions.py"):
        app = load_app(spec)
        trainer = trainer_for(app)
        examples = app.data(Shard("train"))
        assert isinstance(examples, Examples)
        result = trainer.train(
            np.ones(2, np.float32), {"count": np.array([9])}, examples, LocalPlan(), seed=0
        )
        np.testing.assert_array_equal(result.delta, [4, 4])
        assert result.steps == 1


@pytest.mark.parametrize(
    ("line", "own"),
    [("own_data = True", True), ("import numpy as np; own_data = np.arange(9.0)", False), ("", False)],
)
def test_a_module_has_own_data_where_it_says_so_and_not_where_something_has_that_name(
    line: str, own: bool, tmp_path: Path
) -> None:
    (tmp_path / "module.py").write_text(f"{FUNCTIONS}\n{line}\n")
    assert load_app(f"{tmp_path}/module.py").own_data is own


def test_own_data_that_are_no_yes_or_no_are_named(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "class App:\n    own_data = 'data.csv'\n    def model(self): ...\n    def data(self, shard): ...\n"
    )
    with pytest.raises(AppError, match=r"own_data is 'data\.csv': say True"):
        load_app(f"{tmp_path}/plain.py")


WITHOUT_BASE = """
import os
from os.path import join
from pathlib import Path
import numpy as np

class WithoutBase:
    joined, data_path = (), Path("its own")
    def model(self):
        return {"w": np.zeros(2, np.float32)}
    def data(self, shard):
        return np.ones((4, 2)), np.arange(4.0)
    def join(self, config):
        self.joined = sorted(config)
    def arrived(self, examples, now):
        return range(int(now))
    def train(self, model, examples, plan, seed):
        before = int(self.kept or b"0")
        self.kept = b"%d" % (before + 1)
        return {"before": before, "from": self.version, "told": len(self.options)}
    def evaluate(self, model, examples):
        return {"loss": 1.0}

class Frozen(WithoutBase):
    __slots__ = ()
    def __setattr__(self, name, value):
        raise AttributeError(name)
    def train(self, model, examples, plan, seed):
        return {"before": 0}
    def join(self, config):
        pass

class Fields(Frozen):
    def __setattr__(self, name, value):
        raise ValueError(f"no field {name}")

def model():
    return WithoutBase().model()
data, evaluate, options = WithoutBase().data, WithoutBase().evaluate, "the script's own"
def train(model, examples, plan, seed):
    return {"before": 0, "told": len(options)}
"""


@pytest.fixture
def without_base(tmp_path: Path) -> Path:
    path = tmp_path / "without_base.py"
    path.write_text(WITHOUT_BASE)
    return path


def test_a_class_without_the_base_has_what_an_app_has(without_base: Path) -> None:
    app = load_app(f"{without_base}:WithoutBase")
    join_run(app, {"fleet": {}, "client": {}})
    assert app.adapted.joined == ["client", "fleet"]  # type: ignore[attr-defined]
    assert app.adapted.data_path == Path("its own")  # type: ignore[attr-defined]
    there = arrived_of(app, app.data(Shard("train")), now=3.5)
    assert there is not None
    assert there.y.tolist() == [0, 1, 2]
    app.version, app.options = 7, {"key": "value"}
    for kept in (b"", b"1"):
        assert app.kept == kept
        found = train(app, app.model(), there, LocalPlan(), seed=0)
        assert found == {"before": int(kept or b"0"), "from": 7, "told": 1}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"settings"}))  # which may be anything of its own
def test_whatever_an_app_is_asked_a_class_without_the_base_is_asked(name: str) -> None:
    asked = Asked()
    of_data = (np.zeros((2, 3)), np.zeros(2))
    both = {"model": dict, "data": lambda own, shard: asked.method("data")(own, shard) and of_data}
    target = type("Plain", (), {**both, name: both["data"] if name == "data" else asked.method(name)})()
    app = app_of(target, "plain")
    given = {"options": {"folder": "/data"}, "runtime": object(), "version": 3, "kept": b"1", "zeroth": None}
    for own, value in given.items():
        setattr(app, own, value)
    args = arguments(name)
    found = getattr(app, name)(*args)
    assert asked.calls == [(name, args, given)]
    assert name == "data" or found == asked.calls[0]


@pytest.mark.parametrize(
    ("name", "metrics"),
    [(":Frozen", {"before": 0}), (":Fields", {"before": 0}), ("", {"before": 0, "told": 16})],
)
def test_what_takes_no_attributes_is_an_app_all_the_same(
    without_base: Path, name: str, metrics: dict[str, float]
) -> None:
    app = load_app(f"{without_base}{name}")
    app.options = {"key": "value"}
    join_run(app, {"fleet": {}})  # not by the `join` of os.path's that the module has imported
    assert app.options == {"key": "value"}
    assert app.kept == b""
    assert train(app, app.model(), app.data(Shard("train")), LocalPlan(), seed=0) == metrics


@pytest.mark.parametrize("workers", [0, 1])
def test_devices_without_the_base_keep_their_own_in_a_simulation(
    without_base: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(without_base.parent)  # the class is sent to a worker, which imports it
    run = ab.simulate(
        import_module("without_base").WithoutBase,
        strategy="fedasync",
        fleet=ab.Fleet(clients=3),
        until=ab.Until(updates=9),
        workers=workers,
    )
    del sys.modules["without_base"]
    given = {row["client"]: (row["updates"], row["trained_before"]) for row in run.devices}
    assert sum(applied for applied, _ in given.values()) == 9
    assert all(before == applied - 1 for applied, before in given.values()), given


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("fashion-mnits", r"unknown workload 'fashion-mnits'; did you mean 'fashion-mnist'\?"),
        ("nowhere.py:App", "nowhere.py: there is no such file in {here}, where the command was typed$"),
        ("/nowhere.py:App", "^/nowhere.py: there is no such file$"),
        ("{folder}/half.py", r"no method 'model'; .*did you mean {folder}/half.py:Half or .*:Needy\?$"),
        ("{folder}/named.py", r"did you mean {folder}/named.py:mine\?$"),
        ("{folder}/run.toml", r"run.toml is a file of settings: name an App here"),
        ("misspelt.tolm", r"no module 'misspelt'; did you mean 'misspelt.toml'\? built in are"),
        ("no_such_module:App", "there is no module 'no_such_module'"),
        ("{file}:Ap", r"has no attribute 'Ap'; did you mean 'App'\?"),
        ("{file}:torch", "no method 'model'"),
        ("{folder}/half.py:Half", "no method 'data'"),
        ("{folder}/half.py:Bare", "no method 'data'"),
        ("{folder}/half.py:Needy", "Needy must be made without arguments"),
        ("{folder}/broken.py:App", r"broken.py: it cannot be loaded \(.*broken.py:1\): SyntaxError"),
        (
            "{folder}/lacking.py:App",
            r"lacking.py: it cannot be loaded \(.*py:1\): .*'no_such_package': install it",
        ),
        ("anabranch.workloads.app:App", "no method 'model'"),
        ("", "unknown workload ''"),
    ],
)
def test_each_mistake_is_named(file: Path, spec: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = file.parent
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text("")
    # No other test has a folder of that name, which would be a package.
    (folder / "misspelt.toml").write_text("")
    (folder / "named.py").write_text(
        "from anabranch.workloads import App\n"
        "class _Half(App):\n    def model(self): return {}\n    def data(self, shard): return [], []\n"
        "mine = _Half()\n"
    )
    (folder / "half.py").write_text(
        "from anabranch.workloads import App\n"
        "class Half(App):\n    def model(self): return {}\n"
        "class Bare:\n    def model(self): return {}\n"
        "class Needy(App):\n    def __init__(self, url): pass\n"
    )
    (folder / "broken.py").write_text("class App(:\n")
    (folder / "lacking.py").write_text("import no_such_package\n")
    with pytest.raises(AppError, match=text.format(folder=folder, here=Path.cwd())):
        load_app(spec.format(file=file, folder=folder))


@pytest.mark.parametrize("spec", ["a_folder", "./a_folder/", "a-folder"])
def test_a_folder_is_told_from_an_app(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path(spec).mkdir()
    place = spec.rstrip("/")
    with pytest.raises(
        AppError, match=rf"is a folder: .*flower:{place} \(or --flower {place}\).*/app\.py:App"
    ):
        load_app(spec)


def test_torch_is_asked_for_only_by_those_who_need_it() -> None:
    code = """
import sys
sys.modules["torch"] = None
from anabranch.core.errors import AppError
from anabranch.workloads import load_app, trainer_for
assert trainer_for(load_app("synthetic")).spec.size == 1002
try:
    trainer_for(load_app("digits"))
except AppError as error:
    assert 'pip install "anabranch[client]"' in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_examples_and_shards_are_checked() -> None:
    with pytest.raises(DataError, match="x has 2 rows and y has 3"):
        Examples(np.zeros((2, 1)), np.zeros(3))
    with pytest.raises(DataError, match="there are none"):
        Examples(np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(DataError, match=r"shard\.role must be one of"):
        Shard("holdout")
    with pytest.raises(DataError, match=r"shard\.index must be from 0 to 3, not 4"):
        Shard("train", 4, 4)
    with pytest.raises(DataError, match=r"shard\.index must be a whole number, .* not 1\.5"):
        Shard("train", 1.5, 4)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"shard\.count must be a whole number, the count at least 1, not 0"):
        Shard("train", 0, 0)
    several: Any = np.arange(5)
    assert Shard("train", several[2], several[4]).index == 2
