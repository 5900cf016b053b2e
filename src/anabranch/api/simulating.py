"""`simulate`: a fleet on a virtual clock, in one call. The command `anabranch simulate` ends here as well."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from anabranch.api.fleets import Fleet
from anabranch.api.objects import RunObjects, Settings, Source, plan_run
from anabranch.api.progress import LiveBar, RunBar
from anabranch.api.run import Run
from anabranch.api.temporary import TemporaryFolder
from anabranch.api.until import Until
from anabranch.core.config.faults import FaultsTable
from anabranch.core.config.tables import ClientTable, Config, FleetTable
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import AsyncStrategy, Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.parts import members
from anabranch.core.spelling import spelled
from anabranch.reports.folders import claimed
from anabranch.reports.metrics import no_share, nothing_learned
from anabranch.reports.origin import StopRun
from anabranch.reports.result import Result
from anabranch.reports.trackers import Tracker
from anabranch.simulation.executors.pool import check_no_worker_begins
from anabranch.simulation.run import RunProgress
from anabranch.simulation.run import simulate as simulate_config
from anabranch.workloads.app import App

log = logging.getLogger(__name__)

Teller = Callable[[RunProgress], object]
Callback = Teller | Tracker


@spelled()
def simulate(
    source: Source,
    *,
    strategy: Strategy | AsyncStrategy | str | None = None,
    fleet: Fleet | FleetTable | None = None,
    uplink: str | None = None,
    downlink: str | None = None,
    robust: RobustTable | None = None,
    training: ClientTable | None = None,
    faults: FaultsTable | None = None,
    seed: int | None = None,
    until: Until | None = None,
    settings: Settings | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = False,
    out: str | Path | None = None,
    workers: int = 0,
    checkpoint_s: float | None = None,
    resume: bool = False,
) -> Run:
    """Simulate a fleet: the engine and the devices of a live run, with real training, on a virtual clock.

    Args:
        source: An App (an object, a class, or by its name as on the command line), a file of settings, or a
            `Config`. What follows counts over what it says.
        strategy: An object of `anabranch.strategies`, one of your own, or a name.
        fleet: The devices: `Fleet(...)`. It is whole: what it does not say is as it is by default.
        uplink: The codec chain of updates, such as `"topk(0.1)|int8|gaps|zstd"`.
        downlink: The codec of models.
        robust: What is done against hostile updates: `Robust(rule="krum")`.
        training: Local training, and how devices push: `Training(epochs=2)`.
        faults: What goes wrong: `Faults(loss=0.1)`.
        seed: What every draw comes of. The same arguments give the same run, to the bit.
        until: When it ends, and what counts: `Until(updates=500)`. Without an end, after 200 updates, which
            a warning says.
        settings: Any other setting, by `"table.key"`.
        callbacks: Functions that hear of `RunProgress` at the start, at each measurement and every second or
            so; `StopRun` ends the run. Trackers too (`start`, `metrics`, `finish`).
        progress: Show a bar with the time left, on standard error, or lines where that is no terminal.
        out: The folder for what the run leaves, which must hold none; None: a temporary one.
        workers: Processes that train; 0: this one. Their App must come from a file.
        checkpoint_s: With `out`, keep what the run needs to go on every so many virtual seconds; None: every
            minute of real time, and when it is interrupted; 0: never.
        resume: Go on with the run in `out`, to the bit, if it is one of the same arguments that was broken
            off; give it back if it has ended, begin if there is none.

    Raises `ConfigError`, `AppError` and `DataError`, each with the fix. What a callback raises comes out.
    """
    objects: RunObjects = {
        "strategy": strategy,
        "fleet": fleet,
        "uplink": uplink,
        "downlink": downlink,
        "robust": robust,
        "training": training,
        "faults": faults,
        "seed": seed,
        "until": until,
        "settings": settings,
    }
    _check_listed(callbacks)
    plan = plan_run(source, objects)
    if plan.said:
        warnings.warn(f"{plan.said}: until=Until(updates=...) says otherwise", stacklevel=3)
    folder = None if out is None else Path(out)
    with LiveBar() if progress else nullcontext() as bar:
        heard = [*callbacks] if bar is None else [*callbacks, RunBar(plan.config.run, bar)]
        run = run_simulation(
            plan.config, folder, plan.app, workers, heard, checkpoint_s=checkpoint_s, resume=resume
        )
    if why := run.result.given_up:
        log.warning("%s on %s was given up: %s", run.result.strategy, run.result.workload, why)
    elif why := nothing_learned(run.result):
        log.warning("%s on %s: %s", run.result.strategy, run.result.workload, why)
    if why := no_share(run.result):
        log.warning("%s on %s: %s", run.result.strategy, run.result.workload, why)
    return run


def run_simulation(
    config: Config,
    out: Path | None = None,
    app: App | None = None,
    workers: int = 0,
    callbacks: Iterable[Callback] = (),
    keep_payloads: bool = True,
    checkpoint_s: float | None = None,
    resume: bool = False,
) -> Run:
    """Simulate what a configuration says; `out` and the rest are as for `simulate`. Raises as it does.

    Without `keep_payloads`, and in a temporary folder, the run replays by simulation alone.
    """
    _check_numbers(workers, checkpoint_s)
    if workers:
        check_no_worker_begins()
    tellers, trackers = _parted(callbacks)
    if out is None and (resume or checkpoint_s):
        raise ConfigError("resume= and checkpoint_s= are of a run that keeps its folder: name it, out='...'")

    def tell(progress: RunProgress) -> None:
        for teller in tellers:
            teller(progress)

    temporary = TemporaryFolder() if out is None else None
    with temporary or claimed(out or Path(), explicit=True, resume=resume) as claim:
        folder = claim.absolute()  # what an App does may change the working directory
        try:
            result = simulate_config(
                config,
                folder,
                app,
                workers,
                tell,
                trackers=trackers,
                keep_payloads=keep_payloads and not temporary,
                checkpoint_s=0.0 if temporary else checkpoint_s,
                resume=resume,
            )
        except StopRun:
            result = Result.read(folder)
    return Run(folder, result, app, trusted=True, holds=temporary)


def _check_listed(callbacks: Any) -> None:
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks={callbacks!r}: give a list of functions")


def _check_numbers(workers: Any, checkpoint_s: Any) -> None:
    if not isinstance(workers, Integral) or int(workers) < 0:
        raise ConfigError(f"workers={workers!r}: give how many processes train, or 0 for this one alone")
    known = isinstance(checkpoint_s, Real) and 0 <= float(checkpoint_s) < math.inf
    if checkpoint_s is not None and not known:
        raise ConfigError(f"checkpoint_s={checkpoint_s!r}: give virtual seconds, or 0 for none")


def _parted(callbacks: Iterable[Callback]) -> tuple[Sequence[Teller], Sequence[Tracker]]:
    """The functions and the trackers among callbacks. Raises `ConfigError` for anything else."""
    tellers: list[Teller] = []
    trackers: list[Tracker] = []
    for callback in callbacks:
        is_tracker = all(hasattr(callback, name) for name in members(Tracker, but=("name",)))
        if is_tracker and isinstance(callback, type):
            raise ConfigError(
                f"callbacks: {callback.__name__} is a class: give an object, {callback.__name__}()"
            )
        if is_tracker:
            trackers.append(callback)  # type: ignore[arg-type]
        elif callable(callback):
            tellers.append(callback)
        else:
            raise ConfigError(f"callbacks={callback!r}: give a function of one RunProgress, or a tracker")
    return tellers, trackers
