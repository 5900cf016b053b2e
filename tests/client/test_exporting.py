"""A live run's version as its App's plain model: by hand, by the command, and where nothing is to merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from commands import answer, serving, with_torch
from safetensors.numpy import load_file

from anabranch.core.errors import (
    OUTCOMES,
    AnabranchError,
    AppError,
    ConfigError,
    ManifestMismatch,
    UnknownVersion,
)
from anabranch.workloads.app import App
from anabranch.workloads.calls import merged

APPS = """
import numpy as np
import torch
from torch import nn

from anabranch.workloads import App, Examples
from anabranch.workloads.adapters import lora
from anabranch.workloads.subspace import Subspace


class Plain(App):
    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self, shard):
        draws = np.random.default_rng(shard.index)
        return Examples(draws.normal(size=(40, 6)).astype("float32"), draws.integers(0, 3, 40))


class Adapted(Plain):
    def model(self):
        return lora(super().model(), rank=2, alpha=6.0)


class Few(Subspace):
    def __init__(self):
        super().__init__(Adapted(), dimension=20)
"""
ADDRESSES = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
Tensors = dict[str, npt.NDArray[Any]]


class Run(NamedTuple):
    """A live one: its folder, its App's name, the operators' address."""

    folder: Path
    app: str
    admin: str


@contextmanager
def run(folder: Path, app: str) -> Iterator[Run]:
    """A server of the App with three updates of one device."""
    (folder / "apps.py").write_text(APPS)
    name = f"apps.py:{app}"
    answer(with_torch(folder, "init", name, "--json"))
    with serving(folder, *ADDRESSES, "--strategy", "fedasync") as said:
        device = ("--server", said["address"], "--id", "device-0", "--tasks-max", 3)
        answer(with_torch(folder, "client", name, *device, "--json"))
        yield Run(folder, name, said["admin_address"])


def exported(of: Run, file: str, *options: object) -> CompletedProcess[str]:
    return with_torch(of.folder, "admin", "export", file, *options, "--admin", of.admin, "--json")


def not_exported(of: Run, app: str, wanted: type[AnabranchError], *options: object) -> str:
    """What is said where nothing can be merged; nothing is written."""
    done = exported(of, "none.safetensors", "--merge", app, *options)
    assert done.returncode == OUTCOMES[wanted].exit_code, done.stdout + done.stderr
    assert not (of.folder / "none.safetensors").exists()
    assert not list(of.folder.glob(".merging-*"))
    return done.stderr


def forward(tensors: Tensors, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The perceptron, of plain tensors or of a run's with adapters, in float64 and by hand."""
    for i, layer in enumerate(("0", "2")):
        if i:
            x = np.tanh(x)
        w, parts = tensors.get(f"{layer}.weight"), f"{layer}.parametrizations.weight"
        if w is None:
            a, b = (tensors[f"{parts}.0.{half}"].astype(np.float64) for half in "AB")
            w = tensors[f"{parts}.original"] + 6.0 / 2 * (b @ a)
        x = x @ np.asarray(w, np.float64).T + tensors[f"{layer}.bias"]
    return x


def test_adapters_are_merged_into_what_they_compute(tmp_path: Path) -> None:
    """The forward pass of both files is the same, and not that without what was learnt."""
    with run(tmp_path, "Adapted") as of:
        assert answer(exported(of, "run.safetensors"))["version"] == 3
        told = answer(exported(of, "new/merged.safetensors", "--merge", of.app, "--version", 3))
        assert told == {"version": 3, "file": "new/merged.safetensors"}
        assert "tensors of another model" in not_exported(of, "apps.py:Plain", ManifestMismatch)
        not_exported(of, of.app, UnknownVersion, "--version", 99)
        not_exported(of, "nowhere.py:App", AppError)
        for name in ("model.pt", "model.onnx"):
            done = exported(of, name)
            assert done.returncode == OUTCOMES[ConfigError].exit_code
            assert f"{name}: what is written is safetensors: name it model.safetensors" in done.stderr
            assert not (tmp_path / name).exists()
    before, after = load_file(tmp_path / "run.safetensors"), load_file(tmp_path / "new/merged.safetensors")
    shapes = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    assert {name: array.shape for name, array in after.items()} == shapes
    x = np.random.default_rng(5).normal(size=(50, 6))
    np.testing.assert_allclose(forward(after, x), forward(before, x), atol=1e-5)
    start = {**after, "0.weight": before["0.parametrizations.weight.original"]}
    assert np.abs(forward(after, x) - forward(start, x)).max() > 1e-3


def test_numbers_that_move_adapters_are_merged_in_one_go(tmp_path: Path) -> None:
    with run(tmp_path, "Few") as of:
        answer(exported(of, "merged.safetensors", "--merge", of.app))
        assert {path.name for path in tmp_path.glob(".*")} == set()
    assert set(load_file(tmp_path / "merged.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_run_without_adapters_has_nothing_to_merge(tmp_path: Path) -> None:
    with run(tmp_path, "Plain") as of:
        told = not_exported(of, of.app, AppError)
        assert "the model has no adapters: it never had any, or they are merged already" in told
        assert "tensors of another model" in not_exported(of, "apps.py:Adapted", ManifestMismatch)
        answer(exported(of, "plain.safetensors"))


class Own(App):
    """An App of numpy arrays that says itself what its plain model is."""

    name = "own"

    def model(self) -> Tensors:
        return {"half": np.ones(3, np.float32)}

    def data(self, shard: Any) -> Any:
        raise NotImplementedError(shard)


class Doubled(Own):
    def merged(self, tensors: Any) -> Any:
        return {"whole": tensors["half"] * 2}


class Broken(Own):
    def merged(self, tensors: Any) -> Any:
        return list(tensors)


def test_an_app_may_say_itself_what_its_plain_model_is() -> None:
    run: Tensors = {"half": np.full(3, 4.0, np.float32)}
    assert merged(Doubled(), run)["whole"].tolist() == [8.0, 8.0, 8.0]
    with pytest.raises(AppError, match="own: a model of numpy arrays has no adapters: there is nothing"):
        merged(Own(), run)
    with pytest.raises(AppError, match=r"Broken.merged"):
        merged(Broken(), run)
