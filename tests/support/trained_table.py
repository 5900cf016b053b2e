"""What devices that train, mask and remember go together with, in the simulator: each cell is tried."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from frozen_apps import Head
from growing_app import App as Growing
from kept_state import Tables

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate
from anabranch.testing.federation import config
from anabranch.workloads.adapters import lora
from anabranch.workloads.app import App
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace
from anabranch.workloads.synthetic import Synthetic

UPDATES, TAKEN_MIN = 16, 8
BUFFER = {"name": "fedbuff", "buffer_size": 3}
PHASES = [
    {"strategy": "fedavg", "clients_per_round": 2, "deadline_s": 20.0, "until_versions": 1},
    {"strategy": "fedbuff", "buffer_size": 2},
]
STREAMING = {"push": "elastic", "push_when": "interval", "push_steps": 3, "merge": "blend"}


class Adapted(Digits):
    """Adapters of rank 2 at both layers."""

    name = "adapted"

    def model(self) -> Any:
        """All else is frozen."""
        return lora(super().model(), rank=2, alpha=2.0)


class Numbers(Subspace):
    """64 numbers."""

    name = "numbers"

    def __init__(self, data_path: str = "") -> None:
        super().__init__(Digits(data_path), dimension=64)


ROUNDS = {"name": "fedavg", "clients_per_round": 3, "deadline_s": 20.0}
ROWS: dict[str, tuple[type[App], Tables]] = {
    "whole models": (Synthetic, {}),
    "Nesterov": (Synthetic, {"strategy": {**BUFFER, "outer": {"name": "nesterov", "lr": 0.5}}}),
    "rounds, Adam": (Synthetic, {"strategy": {**ROUNDS, "outer": {"name": "adam", "lr": 0.01}}}),
    "delayed Nesterov": (Synthetic, {"strategy": {"name": "delayed_nesterov", "buffer_size": 3}}),
    "phases": (Synthetic, {"strategy": {"name": "phased", "phases": PHASES}}),
    "sub-models by score": (Synthetic, {"strategy": {"name": "asyncdrop"}}),
    "TEASQ of sub-models": (Synthetic, {"strategy": {"name": "teasq_drop", "cache_size": 3}}),
    "adapters": (Adapted, {}),
    "adapters, halves in turns": (Adapted, {"submodel": {"name": "alternate", "period": 1}}),
    "a frozen part": (Head, {}),
    "a subspace": (Numbers, {}),
    "no gradients": (Digits, {"client": {"gradient": "zeroth"}}),
    "data that arrive": (Synthetic, {"fleet": {"arrival": "stream", "arrival_rate": 20.0}}),
    "fragments": (Digits, {"submodel": {"name": "fragments", "parts": 2}}),
    "a model that grows": (Growing, {"submodel": {"name": "progressive", "warm_up_versions": 1}}),
    "sent in the background": (Synthetic, {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}}),
    "fragments that stream": (
        Digits,
        {
            "strategy": {"name": "fedasync", "alpha": 0.5},
            "submodel": {"name": "fragments", "parts": 2},
            "client": STREAMING,
        },
    ),
}
COLUMNS: dict[str, Tables] = {
    "error feedback": {"uplink": {"codec": "ef(0.9)|topk(0.1)|int8(256)|gaps|zstd"}},
    "delta log": {"downlink": {"codec": "log(2)"}},
    "robust rule": {"robust": {"rule": "centred_clipping", "clip": 3.0}},
    "masked sums": {
        "secagg": {"mode": "keeper", "keepers": ["north", "south"], "clip": 2.0, "cohort_min": 2}
    },
    "privacy": {"privacy": {"clip": 1.0, "noise": 0.5, "participations": 16}},
    "crashes": {
        "uplink": {"codec": "ef(0.9)|topk(0.1)|int8(256)|gaps|zstd"},
        "server": {"snapshot_every_updates": 3},
        "faults": {
            "loss": 0.1,
            "device_crash_every_s": 6.0,
            "server_crash_every_s": 5.0,
            "server_down_s": 1.0,
        },
    },
}
BASE: dict[str, dict[str, Any]] = {
    "run": {"updates_max": UPDATES, "seed": 4},
    "client": {"steps": 3, "learning_rate": 0.02},
}


def _settings(row: str, column: str) -> Config:
    layers = [("base", config(**BASE).to_json()), ("row", {"strategy": BUFFER, **ROWS[row][1]})]
    return merge([*layers, ("column", COLUMNS[column])])


def refusal(row: str, column: str) -> str:
    """Why a run of that cell does not begin; empty where it does."""
    try:
        with open_simulation(_settings(row, column), app=ROWS[row][0]()):
            return ""
    except ConfigError as error:
        return str(error)


def trained(row: str, column: str) -> str:
    """What comes of a cell: empty where it works, else why it is refused.

    Works: devices train, the run makes versions, and its folder replays. Raises `AssertionError` for a cell
    that is neither.
    """
    if why := refusal(row, column):
        return why
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(_settings(row, column), Path(folder), ROWS[row][0]())
        assert result.updates_applied >= TAKEN_MIN, (row, column)
        assert result.versions > 0, (row, column)
        assert replay_run(Path(folder), load_code=True).journal_sha256 == result.journal_sha256, (row, column)
    return ""
