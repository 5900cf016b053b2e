"""MLflow: a run of the experiment `anabranch`, or of `MLFLOW_EXPERIMENT_NAME`.

It is kept where `MLFLOW_TRACKING_URI` says, a server or a database, else in `mlflow.db` of the run's folder.
The step is the version; time, updates and bytes are metrics beside it, under `run/`; settings are parameters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from anabranch.core.errors import ConfigError
from anabranch.reports.tracking.run import Dated, TrackedRun, flat

EXPERIMENT = "anabranch"
PARAM_CHARS_MAX = 500
PARAMS_AT_ONCE = 100


class Mlflow(Dated):
    """See `Tracker`. Nothing of it is global to the process, so several runs may go on at a time."""

    name: ClassVar[str] = "mlflow"

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Begins MLflow's run. Raises `ConfigError` where there is nowhere to keep it."""
        address, artifacts = _place(run)
        self._client = client = MlflowClient(tracking_uri=address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name, artifacts) if found is None else found.experiment_id
        tags = {"strategy": run.strategy, "workload": run.workload, "kind": run.kind, "seed": str(run.seed)}
        self._run_id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(name, str(value)[:PARAM_CHARS_MAX]) for name, value in flat(run.config).items()]
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._run_id, params=params[begin : begin + PARAMS_AT_ONCE])

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """All in one call."""
        found, now_ms = self.dated(values), round(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(n, v, now_ms, version) for n, v in found.items()])

    def finish(self, result: Mapping[str, Any]) -> None:
        """Ends it, as finished or killed."""
        if self._client is not None:
            status = "KILLED" if result.get("status") == "interrupted" else "FINISHED"
            self._client.set_terminated(self._run_id, status)


def _place(run: TrackedRun) -> tuple[str, str | None]:
    """Where runs are kept, and their files; None: as a server says."""
    if (address := os.environ.get("MLFLOW_TRACKING_URI")) is not None:
        return address, None
    if run.folder is None:
        raise ConfigError("the tracker mlflow: this run has no folder: set MLFLOW_TRACKING_URI")
    folder = Path(run.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db", (folder / "mlflow-artifacts").as_uri()
