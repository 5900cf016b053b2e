"""Devices on one machine share its cores, by locks that a crash frees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anabranch.client.base_model import BaseModel
from anabranch.client.neighbours import Neighbours
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable
from anabranch.support import allowance
from anabranch.support.allowance import cores
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.synthetic import Synthetic

NEIGHBOUR = """
import sys
from pathlib import Path
from anabranch.client.neighbours import Neighbours
with Neighbours(Path(sys.argv[1])):
    print("here", flush=True)
    sys.stdin.read()
"""


class Neighbour:
    """Another process that trains; `kill` it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", NEIGHBOUR, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"here\n"

    def kill(self) -> None:
        with self._process:
            self._process.kill()


def test_neighbours_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "neighbours"
    assert Neighbours(folder).count() == 1, "nobody is there, so it is for oneself"
    with Neighbours(folder) as one:
        assert one.count() == 1
        others = [Neighbour(folder) for _ in range(2)]
        try:
            assert one.count() == 3
        finally:
            for other in others:
                other.kill()
        assert one.count() == 1, "a crash frees a place"
        with Neighbours(folder):
            assert one.count() == 2
        assert len(list(folder.iterdir())) <= 3, "places are taken again"


def test_one_without_a_meeting_place_is_alone(tmp_path: Path) -> None:
    file = tmp_path / "no-folder"
    file.touch()
    with Neighbours(file) as one, Neighbours(file):
        assert one.count() == 1


class Counting(App):
    """Writes down with how many threads it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.threads: list[int] = []

    def model(self) -> object:
        import torch

        return torch.nn.Linear(self.width, 1000)

    def data(self, shard: Shard) -> Examples:
        return Synthetic().data(shard)

    def evaluate(self, model: object, examples: Examples) -> dict[str, float]:
        import torch

        self.threads.append(torch.get_num_threads())
        return {"loss": 0.0}


def test_torch_takes_a_fair_part_of_the_cores(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    before, app, small = torch.get_num_threads(), Counting(1000), Counting(10)
    try:
        torch.set_num_threads(4)
        whole = min(4, cores())
        with Neighbours(tmp_path) as here:
            local = LocalTrainer(app, ClientTable(device="cpu"), neighbours=here)
            base = BaseModel(0, np.zeros(local.spec.size, np.float32), {})
            examples = app.data(Shard("test"))
            local.evaluate(base, examples)
            with Neighbours(tmp_path):
                local.evaluate(base, examples)
                with Neighbours(tmp_path), Neighbours(tmp_path), Neighbours(tmp_path):
                    local.evaluate(base, examples)
            local.evaluate(base, examples)
            local = LocalTrainer(small, ClientTable(device="cpu"), neighbours=here)
            local.evaluate(BaseModel(0, np.zeros(local.spec.size, np.float32), {}), examples)
    finally:
        torch.set_num_threads(before)
    assert app.threads == [whole, max(1, whole // 2), 1, whole]
    assert small.threads == [1]


def test_torch_takes_no_more_than_a_container_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    (tmp_path / "ours").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(allowance, "GROUPS", tmp_path)
    monkeypatch.setattr(allowance, "OURS", tmp_path / "ours")
    try:
        for said, taken in ((0, 1), (3, 3)):
            torch.set_num_threads(4)
            LocalTrainer(Counting(1000), ClientTable(device="cpu"), threads=said)
            assert torch.get_num_threads() == taken
    finally:
        torch.set_num_threads(before)
