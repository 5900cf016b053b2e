"""The files by which worker processes get their models."""

from __future__ import annotations

import tempfile
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


def test_a_model_is_written_once_and_read_as_it_is(folder: Path) -> None:
    files, (one, other) = ModelFiles(2), vectors(2)
    path = files.path(one)
    assert files.path(one) == path != files.path(other)
    assert model_at(path).tolist() == one.tolist()
    assert model_at(path).dtype == np.float32
    assert len(list(folder.rglob("*.npy"))) == 2


def test_what_is_written_into_a_model_stays_with_its_reader(folder: Path) -> None:
    files, (one,) = ModelFiles(2), vectors(1)
    model_at(files.path(one))[:] = 7.0
    model_at.cache_clear()
    assert model_at(files.path(one)).tolist() == one.tolist()


def test_a_path_can_be_read_until_so_many_others_were_asked_for(folder: Path) -> None:
    files, models = ModelFiles(3), vectors(6)
    paths = [files.path(model) for model in models]
    assert [path.exists() for path in paths] == [False, False, True, True, True, True]
    again = files.path(models[0])
    assert again not in paths
    assert np.load(again).tolist() == models[0].tolist()


def test_an_array_in_the_place_of_one_that_is_gone_is_another_model(folder: Path) -> None:
    files = ModelFiles(1)
    for i in range(50):  # Python gives the same address again
        path = files.path(np.full(5, float(i)))
        assert np.load(path).tolist() == [float(i)] * 5


def test_nothing_is_left(folder: Path) -> None:
    files = ModelFiles(2)
    files.path(vectors(1)[0])
    files.close()
    assert list(folder.iterdir()) == []
