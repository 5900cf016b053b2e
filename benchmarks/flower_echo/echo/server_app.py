"""Four arrays of 100,000 numbers altogether, averaged in rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

PARAMETERS = 100_000

app = ServerApp()


def model() -> Any:
    """Zeros."""
    return ArrayRecord([np.zeros(PARAMETERS // 4, np.float32) for _ in range(4)])


@app.main()
def main(grid: Any, context: Any) -> None:
    """Flower's own loop."""
    del context
    FedAvg().start(grid=grid, initial_arrays=model(), num_rounds=3)
