"""Flower's own strategy, in rounds."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from peer.task import first_model

app = ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """Three rounds."""
    steps = int(context.run_config["steps"])
    told = ConfigRecord({"steps": steps})
    FedAvg().start(grid=grid, initial_arrays=first_model(steps), num_rounds=3, train_config=told)
