"""`Run`: what a run came to, on top of the folder that it has left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file

from anabranch.api.figures import Figure, curves
from anabranch.api.objects import given_app
from anabranch.api.records import Records
from anabranch.core.config.extras import how_to_install
from anabranch.core.config.tables import Config
from anabranch.core.errors import NOT_ALIKE, ConfigError, DataError, ReplayMismatch
from anabranch.core.parts import is_code
from anabranch.core.spelling import did_you_mean
from anabranch.reports.compare import Against
from anabranch.reports.html import REPORT_FILE
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.metrics import final_text
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.recorder import EVENT_KINDS, EVENTS_FILE
from anabranch.reports.result import Result
from anabranch.reports.text import bytes_text, count_text, duration_text
from anabranch.support.code import check_trusted, distrusted
from anabranch.workloads.app import App, load_app
from anabranch.workloads.calls import model_of

if TYPE_CHECKING:
    import torch

    from anabranch.simulation.replay import ReplayOutcome


class Run:
    """A run that has ended: its figures, its model, and its proof.

    `folder` has the files of docs/results.md. One that `simulate` has made without `out` is temporary: it
    goes with this object, and `save` keeps it. `result` is what `result.json` says.
    """

    def __init__(
        self,
        folder: Path,
        result: Result,
        app: App | None = None,
        *,
        trusted: bool = False,
        holds: object = None,
    ) -> None:
        self.folder, self.result = folder, result
        self._app, self._trusted = app, trusted
        self._holds = holds  # what keeps a temporary folder there

    @cached_property
    def config(self) -> Config:
        """The settings that the run was started with; passwords are masked. Raises `DataError`."""
        return JournalReader(self.folder).config

    @cached_property
    def history(self) -> Records:
        """A row for each version that was measured: when, after what, and every metric.

        `time_s` are seconds since the run's start, virtual ones in a simulation; updates and bytes are all
        up to then. A metric that was not finite is None.
        """
        rows = [
            {
                "time_s": p.time_s,
                "version": p.version,
                "updates": p.updates,
                "uplink_bytes": p.uplink_bytes,
                "downlink_bytes": p.downlink_bytes,
                **p.measured,
            }
            for p in self.result.history
        ]
        return Records(rows)

    @cached_property
    def devices(self) -> Records:
        """A row for each device: what it gave, and what its last applied update says of its training.

        `examples` and `staleness_mean`, in versions, are over its applied updates.
        """
        return Records(
            {
                "client": name,
                **{key: value for key, value in vars(share).items() if key != "metrics"},
                **{f"trained_{metric}": value for metric, value in share.metrics.items()},
            }
            for name, share in self.result.clients.items()
        )

    def events(self, kind: str = "") -> Records:
        """What happened, in order, or what of one kind, such as `decided`; columns are those of its rows.

        Raises `DataError` where the folder has no record of them, `ConfigError` for a kind that is none.
        """
        path = self.folder / EVENTS_FILE
        if not path.is_file():
            raise DataError(f"{path} is missing: the run has left no record of what happened")
        with path.open(encoding="utf-8") as lines:
            found = Records(row for row in map(json.loads, lines) if kind in ("", row["kind"]))
        if kind not in ("", *EVENT_KINDS) and not found:  # a newer release may have others
            hint = did_you_mean(kind, EVENT_KINDS) or f"there are {', '.join(EVENT_KINDS)}"
            raise ConfigError(f"events: no event is of the kind {kind!r}: {hint}")
        return found

    def weights(self, best: bool = False) -> dict[str, Any]:
        """The last version of the model, or the best one that was measured: numpy arrays by name.

        Raises `DataError` where there is none.
        """
        path = self._model_file(best)
        return dict(load_file(path))

    def state_dict(self, best: bool = False) -> dict[str, torch.Tensor]:
        """The same as torch tensors, for `load_state_dict`. Raises `ConfigError` without torch."""
        try:
            from safetensors.torch import load_file as load_tensors
        except ModuleNotFoundError:
            raise ConfigError(f"torch is not installed: {how_to_install('torch')}") from None
        return dict(load_tensors(self._model_file(best)))

    def model(self, best: bool = False) -> Any:
        """The App's own model with these weights: a torch module, set to evaluate, or a dict of arrays.

        Raises `ConfigError` where the App is code that a folder names: give it to `open_run`.
        """
        app = self.app
        made: Any = {} if app.any_model else model_of(app, self.result.seed)
        if isinstance(made, dict):
            found = self.weights(best)  # in the file's order
            return {name: found[name] for name in (*made, *found) if name in found}
        made.load_state_dict(self.state_dict(best))
        return made.eval()

    @property
    def app(self) -> App:
        """The run's App. Raises `ConfigError` and `AppError`."""
        if self._app is None:
            run = self.config.run
            if is_code(run.workload) and not self._trusted:
                raise distrusted(str(self.folder), "run.workload", run.workload)
            self._app = load_app(run.workload, run.data_path)
        return self._app

    def check_code(self) -> None:
        """Raises `ConfigError` where its settings name code, and nobody has said that it may run."""
        from anabranch.simulation.parts import REPLAYED

        if not self._trusted:
            check_trusted(self.config, REPLAYED, str(self.folder))

    def replay(self, workers: int = 0, tell: Callable[[float], object] = lambda _: None) -> ReplayOutcome:
        """Have the run's history again through a fresh engine, and compare the digests.

        `tell` is told, now and then, which share of it is there again, 0 to 1.
        Raises `ReplayMismatch` where they differ, `DataError` for a folder that is no whole run, and
        `ConfigError` where it names code.
        """
        from anabranch.simulation.replay import replay_run

        outcome = replay_run(self.folder, self._app, workers, self._trusted, tell)
        if not outcome.matches:
            changed = " and ".join(outcome.changed)
            why = f"the code of {changed} has changed since" if changed else NOT_ALIKE
            raise ReplayMismatch(
                f"{self.folder}: replayed to model {outcome.model_sha256}, journal {outcome.journal_sha256}; "
                f"result.json says otherwise: {why}"
            )
        return outcome

    def plot(self, metric: str = "", against: Against = "time") -> Figure:
        """A metric, or else what the run is judged by, over `time`, `updates` or `bytes`.

        Raises `DataError` for what was not measured, or another measure.
        """
        return curves([self.result], against, metric)

    @property
    def report(self) -> Path:
        """The page that shows all of it, and opens offline."""
        return self.folder / REPORT_FILE

    def save(self, folder: str | Path) -> Run:
        """The run in another folder, which must not be there. Raises `ConfigError`."""
        target = Path(folder)
        try:
            shutil.copytree(self.folder, target)
        except FileExistsError:
            what = f"{target} is there already: name another folder, or move that one away"
            raise ConfigError(what) from None
        return Run(target, self.result, self._app, trusted=self._trusted)

    def _model_file(self, best: bool) -> Path:
        path = self.folder / (BEST if best else FINAL)
        if not path.is_file():
            why = "no version was measured" if best else "the run has left no model"
            raise DataError(f"{path} is missing: {why}")
        return path

    def __repr__(self) -> str:
        r = self.result
        end = "" if r.status == "finished" else f", {r.status}"
        return f"<Run {r.strategy} on {r.workload}, seed {r.seed}: {final_text(r)}{end}; {self.folder}>"

    def _repr_html_(self) -> str:
        r = self.result
        figures = {
            "updates": count_text(r.updates_applied),
            "versions": count_text(r.versions),
            "mean staleness": f"{r.staleness.mean:.2f}",
            "up": bytes_text(r.uplink_bytes),
            "down": bytes_text(r.downlink_bytes),
            "virtual time": duration_text(r.virtual_s),
            "real time": duration_text(r.wall_s),
        }
        head = "".join(f"<th>{name}</th>" for name in figures)
        cells = "".join(f"<td>{value}</td>" for value in figures.values())
        title = escape(f"{r.strategy} on {r.workload}, seed {r.seed}: {final_text(r)}")
        drawing = self.plot()._repr_html_() if r.history else ""
        return f"<p><b>{title}</b></p><table><tr>{head}</tr><tr>{cells}</tr></table>{drawing}"


def open_run(folder: str | Path, app: Any = None, load_code: bool = False) -> Run:
    """The run in a folder, live or simulated.

    Code that the folder names, its App or its strategy, is run only with `load_code`; or `app`, an App, its
    class or its name, stands in for the App. Raises `FolderMissing` and `DataError` for what is no run that
    has ended, and `AppError` for what is no App.
    """
    where = Path(folder)
    return Run(where, Result.read(where), None if app is None else given_app(app), trusted=load_code)
