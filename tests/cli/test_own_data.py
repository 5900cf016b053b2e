"""What a device says of the data that it trains on, and the way to say that they are its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import anabranch, answer, serving

# 300 examples, of which 60 are for tests; of the others 24 validate, where it is not own data.
APP = """
import numpy as np
import torch

import anabranch as ab

x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
app = ab.app(lambda: torch.nn.Linear(4, 2), (x, y), name="halves")
own = ab.app(lambda: torch.nn.Linear(4, 2), (x, y), name="halves", own_data=True)


class Plain:
    name = "halves"
    own_data = True

    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, shard):
        return x[shard.index :: shard.count], y[shard.index :: shard.count]
"""
RUN = '[run]\nworkload = "halves.py:app"\nname = "halves"\n[fleet]\nclients = 8\nsplit = "dirichlet"\n'
BY_NAME = "berlin-1: shard 1 of 8 by the number in its name (--shard gives another"
OWN = "berlin-1: all of its own data but those for tests"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with the App, and the address of a server of its model."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "halves.py").write_text(APP)
    (folder / "run.toml").write_text(
        RUN + '[server]\naddress = "127.0.0.1:0"\nadmin_address = "127.0.0.1:0"\n'
    )
    answer(anabranch(folder, "init", "halves.py:app", "--out", "model", "--json"))
    with serving(folder, "run.toml", "--model", "model") as said:
        yield folder, said["address"]


@pytest.mark.parametrize(
    ("app", "more", "where", "examples"),
    [
        ("own", (), OWN, "examples=240 examples_here=300"),
        ("own", ("--shard", "0/1"), "berlin-1: all of the training data", "examples=216 examples_here=300"),
        ("app", ("--shard", "3/8"), "berlin-1: shard 3 of 8, state in", " examples_here=300"),
        ("app", (), BY_NAME, " examples_here=300"),
        ("Plain", (), OWN, "examples=300\n"),
    ],
)
def test_a_device_says_how_much_it_trains_on(
    app: str, more: tuple[str, ...], where: str, examples: str, place: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = place
    words = ("--server", address, "--id", "berlin-1", "--state-dir", tmp_path, "--tasks-max", "1", *more)
    done = anabranch(folder, "client", f"halves.py:{app}", *words)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    placed, enrolled = (line for line in lines if "berlin-1: " in line or "enrolled" in line)
    assert where in placed
    assert examples in enrolled
