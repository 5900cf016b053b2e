"""A small transformer with adapters, live: two devices, and a server that is killed while both train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from commands import anabranch, answer
from outages import counted, outage
from safetensors.numpy import load_file, save_file

import anabranch as ab
from anabranch.support.code import load
from scripts import EXAMPLES

NAME = f"{EXAMPLES / 'adapters.py'}:Adapted"
LONG_S = 600.0
UPDATES = 8

Adapted: Any = load(NAME)
Whole: Any = load(NAME.replace("Adapted", "Whole"))


class Device(Adapted):  # type: ignore[misc]
    """`began` is called in its first training."""

    name = "device"

    def __init__(self, weights: Path, began: Callable[[], object]) -> None:
        super().__init__(str(weights))
        self._began = began

    def train(self, *given: Any) -> Any:
        began, self._began = self._began, lambda: None
        began()
        return super().train(*given)


def pretrained(folder: Path, seed: int) -> Path:
    """A file of weights: those of seed 0 are the server's. Made here, as threads draw from one generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = Whole().model().state_dict()
    save_file({name: tensor.numpy() for name, tensor in weights.items()}, folder / f"{seed}.safetensors")
    return folder / f"{seed}.safetensors"


def bytes_up(folder: Path) -> int:
    """All that came up, with updates that came when the run had ended."""
    found: int = answer(anabranch(folder, "report", "data", "--out", "again", "--json"))["uplink_bytes"]
    return found


def test_two_devices_of_adapters_and_a_server_that_is_killed(tmp_path: Path) -> None:
    """One device has the frozen part itself; the other one has another base, and fetches it once."""
    files = [pretrained(tmp_path, seed) for seed in (0, 1)]
    told: dict[str, list[str]] = {"has": [], "fetches": []}
    with outage(tmp_path, NAME, UPDATES) as server:
        both = Barrier(2, action=server.kill)

        def device(name: str, part: int) -> ab.Client:
            return ab.Client(
                Device(files[part], lambda: both.wait(LONG_S)),
                server.address,
                id=name,
                shard=(part, 2),
                state_dir=tmp_path / name,
                on_event=lambda kind, **_: told[name].append(kind),
            )

        with device("has", 0) as first, device("fetches", 1) as second:
            first.wait(LONG_S)
            second.wait(LONG_S)
    assert sum(counted(tmp_path).values()) == UPDATES
    assert [told[name].count("fetched_frozen") for name in ("has", "fetches")] == [0, 1]
    start = Adapted(str(files[0])).model()
    frozen = {n: p.detach().numpy().tobytes() for n, p in start.named_parameters() if not p.requires_grad}
    final = load_file(tmp_path / "run" / "final.safetensors")
    (file,) = (tmp_path / "fetches" / "frozen").iterdir()
    assert {n: a.tobytes() for n, a in load_file(file).items()} == frozen
    assert {n: final[n].tobytes() for n in frozen} == frozen
    assert any((final[n] != p.detach().numpy()).any() for n, p in start.named_parameters() if n not in frozen)
    values = sum(p.numel() for p in start.parameters() if p.requires_grad)
    assert bytes_up(tmp_path) % (4 * values) == 0, "whole updates, of what is trained alone"
