"""A run that a server of this process serves: its addresses, an operator's questions, and what it leaves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from anabranch.api.background import Background
from anabranch.api.live_result import report_of_data
from anabranch.api.run import Run
from anabranch.client.operator import OperatorClient, RunStatus, open_operator, operator_wallet
from anabranch.core.config.tables import Config
from anabranch.core.rng import seed_of
from anabranch.reports.folders import claimed
from anabranch.server.manifest import Manifest, check_frozen, write_manifest
from anabranch.workloads.app import App
from anabranch.workloads.trainer import trainer_for


class Operated:
    """A base class: the addresses and `insecure` are their owner's."""

    @property
    def address(self) -> str:
        """Where devices reach it: `host:port`, of a job `host:port/job`."""
        raise NotImplementedError

    @property
    def admin_address(self) -> str:
        """Where operators do."""
        raise NotImplementedError

    @property
    def join_address(self) -> str:
        """Where devices join; empty where nothing is guarded."""
        raise NotImplementedError

    @property
    def insecure(self) -> bool:
        """Whether other machines are served in the clear."""
        raise NotImplementedError

    def has_device(self, device: Background) -> None:
        """A device of this process begins to work for it."""

    def operator(self, identity: str | Path | None = None) -> OperatorClient:
        """An operator's connection, a context manager; `identity`: the folder of an operator's papers."""
        wallet = operator_wallet(None if identity is None else Path(identity))
        return open_operator(self.admin_address, wallet, self.insecure)

    def status(self) -> RunStatus:
        """How the run stands. Of a guarded server: `operator(identity).status()`."""
        with self.operator() as operator:
            return operator.status()

    def weights(self, best: bool = False) -> dict[str, Any]:
        """The newest version of the model, or the best that was measured: numpy arrays by name."""
        with self.operator() as operator, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            operator.export(path, best=best)
            return dict(load_file(path))


def first_model(app: App, config: Config, folder: Path) -> Manifest:
    """Write what `anabranch init` does: the model's layout and its first weights."""
    trainer, seed = trainer_for(app), seed_of(config.run.seed, "initial")
    first, spec = trainer.initial(seed), trainer.spec
    check_frozen(spec, config.limits)
    parts = spec.groups, spec.buffers, spec.slices
    return write_manifest(folder, config.run.workload, first, *parts, seed, spec.stages)


def run_of_data(
    data_dir: Path, database: str, app: App | None, out: str | Path | None, holds: object = None
) -> Run:
    """What a stopped server has left, as a run's folder `out`; None: in the data's own.

    `holds` keeps the data there. Raises `ConfigError` where the folder holds a run, and the store's errors.
    """
    with claimed(data_dir / "run" if out is None else Path(out), explicit=out is not None) as folder:
        result = report_of_data(data_dir, database, folder)
    return Run(folder, result, app, trusted=True, holds=holds)
