"""The files by which worker processes get their models."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from anabranch.simulation.executors.models import ModelFiles, model_at


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def vectors(count: int) -> list[np.ndarray]:
    return [np.full(5, float(i), np.float32) for i in range(count)]


def lent(files: ModelFiles, vector: np.ndarray, done: bool = True) -> tuple[Path, Future[None]]:
    """The path that a reader was told, and the reader, who may be `done` with it at once."""
    told: list[Path] = []

    def begin(path: Path) -> Future[None]:
        told.append(path)
        return Future()

    reader = files.lend(vector, begin)
    if done:
        reader.set_result(None)
    return told[0], reader


def test_a_model_is_written_once_and_read_as_it_is(folder: Path) -> None:
    files, (one, other) = ModelFiles(2), vectors(2)
    path, _ = lent(files, one)
    assert lent(files, one)[0] == path != lent(files, other)[0]
    assert model_at(path).tolist() == one.tolist()
    assert model_at(path).dtype == np.float32
    assert len(list(folder.rglob("*.npy"))) == 2


def test_what_is_written_into_a_model_stays_with_its_reader(folder: Path) -> None:
    files, (one,) = ModelFiles(2), vectors(1)
    model_at(lent(files, one)[0])[:] = 7.0
    model_at.cache_clear()
    assert model_at(lent(files, one)[0]).tolist() == one.tolist()


def test_the_newest_models_stay(folder: Path) -> None:
    files, models = ModelFiles(3), vectors(6)
    paths = [lent(files, model)[0] for model in models]
    assert [path.exists() for path in paths] == [False, False, False, True, True, True]
    again, _ = lent(files, models[0])
    assert again not in paths
    assert np.load(again).tolist() == models[0].tolist()


def test_a_model_stays_until_its_slowest_reader_is_done(folder: Path) -> None:
    """However many newer ones others have had meanwhile: on a busy machine a worker may stand still."""
    files, models = ModelFiles(2), vectors(9)
    path, slow = lent(files, models[0], done=False)
    for model in models[1:8]:
        lent(files, model)
    assert np.load(path).tolist() == models[0].tolist()
    assert len(list(folder.rglob("*.npy"))) == 3
    slow.set_result(None)
    lent(files, models[8])
    assert not path.exists()
    assert len(list(folder.rglob("*.npy"))) == 2


def test_an_array_in_the_place_of_one_that_is_gone_is_another_model(folder: Path) -> None:
    files = ModelFiles(1)
    for i in range(50):  # Python gives the same address again
        path, _ = lent(files, np.full(5, float(i)))
        assert np.load(path).tolist() == [float(i)] * 5


def test_nothing_is_left(folder: Path) -> None:
    files = ModelFiles(2)
    lent(files, vectors(1)[0], done=False)
    files.close()
    assert list(folder.iterdir()) == []
