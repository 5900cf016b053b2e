"""The code of bundles in one process: each has its modules to itself, and disturbs nobody's."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.errors import AppError
from anabranch.support.bundled_code import from_bundle
from anabranch.workloads.app import App, Shard, load_app
from anabranch.workloads.bundled import bundled_spec

APP = """
from pathlib import Path
import numpy as np
from anabranch.workloads import App, Examples
import helpers
import inner.deep
import inner.deep as deep
from inner import WORD, deep as again
from helpers import who

class Mine(App):
    def model(self):
        import helpers as late
        assert late is helpers
        return {"w": np.full(2, len(who()), np.float32)}

    def data(self, shard):
        text = (Path(__file__).parent / "words.txt").read_text()
        return Examples(np.full((1, 2), len(text)), np.zeros(1, np.int64))

SEEN = [helpers.who(), inner.deep.WHO, deep.WHO, again.WHO, WORD, inner.WORD]
"""


def written(folder: Path, who: str) -> Path:
    """The files of a bundle."""
    for path, text in {
        "app.py": APP,
        "helpers.py": f"def who(): return {who!r}\n",
        "inner/__init__.py": "from . import deep\nfrom .deep import WHO as WORD\n",
        "inner/deep.py": "import helpers\nWHO = helpers.who()\n",
        "words.txt": "words",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_two_bundles_of_the_same_modules_do_not_meet(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", "a"), written(tmp_path / "two", "bb")
    apps = [load_app(bundled_spec(folder, "app:Mine")) for folder in (one, two)]
    assert [type(app).__mro__[1] for app in apps] == [App, App]
    assert [float(app.model()["w"][0]) for app in apps] == [1.0, 2.0]
    assert [from_bundle(folder, "app").SEEN for folder in (one, two)] == [["a"] * 6, ["bb"] * 6]
    np.testing.assert_array_equal(apps[0].data(Shard("train")).x, [[5, 5]])
    assert from_bundle(one, "app") is from_bundle(one, "app")


def test_a_bundle_neither_hides_modules_nor_is_hidden_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "helpers.py").write_text("raise RuntimeError('another')\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    before = list(sys.path)
    folder = written(tmp_path / "bundle", "mine")
    (folder / "json.py").write_text("raise RuntimeError('the library has one')\n")
    (folder / "app.py").write_text(f"import json\n{APP}SEEN.append(json.dumps([]))\n")
    assert [*["mine"] * 6, "[]"] == from_bundle(folder, "app").SEEN
    assert sys.path == before
    assert not {"helpers", "inner", "app"} & set(sys.modules)
    with pytest.raises(RuntimeError, match="another"):
        __import__("helpers")


def test_a_process_that_is_spawned_finds_the_code_of_what_it_is_given(tmp_path: Path) -> None:
    folder = written(tmp_path / "of words", "abc")
    deep = from_bundle(folder, "inner.deep")
    context = multiprocessing.get_context("spawn")  # as workers of a DataLoader's on macOS and Windows
    with ProcessPoolExecutor(1, context) as pool:
        assert pool.submit(from_bundle(folder, "helpers").who).result() == deep.WHO == "abc"


def test_nothing_is_written_beside_the_files(tmp_path: Path) -> None:
    folder = written(tmp_path, "x")
    before = sorted(folder.rglob("*"))
    from_bundle(folder, "app")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "entry", "said"),
    [
        ("import nowhere_at_all\n", "app:Mine", "No module named 'nowhere_at_all'"),
        ("1 / 0\n", "app:Mine", "ZeroDivisionError"),
        ("raise SystemExit\n", "app:Mine", "SystemExit"),
        ("def (:\n", "app:Mine", "SyntaxError"),
        ("class Main: pass\n", "app:Mine", "app has no attribute 'Mine'"),
        ("class Mine: pass\n", "app:Mine", "it has no method 'model'"),
        ("", "other:Mine", "it has no module 'other'$"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path: Path, source: str, entry: str, said: str) -> None:
    (tmp_path / "app.py").write_text(source)
    with pytest.raises(AppError, match=said):
        load_app(bundled_spec(tmp_path, entry))


@pytest.mark.parametrize("place", ["bundle:", "bundle:folder", "bundle:folder:app", "bundle::app:Mine"])
def test_a_place_is_a_folder_a_module_and_a_name(place: str) -> None:
    with pytest.raises(AppError, match="write bundle:FOLDER:module:attribute"):
        load_app(place)
