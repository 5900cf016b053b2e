"""What happens in a run, as its recorder is told: one translation of effects, whoever drives the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from anabranch.compress.registry import STAGES
from anabranch.core.effects import (
    Barred,
    CohortLost,
    Decided,
    Effect,
    Finished,
    Granted,
    LeaseEnded,
    MaskSumWanted,
    Published,
    Refused,
    Reopened,
    RolledBackTo,
    SettingsSet,
    Unbarred,
)
from anabranch.core.engine.engine import Engine
from anabranch.core.model.chains import RAW
from anabranch.core.model.submodels import Submodel, share_of
from anabranch.core.model.updates import Task, Verdict

if TYPE_CHECKING:  # a recorder has files and a clock, and is handed in
    from anabranch.reports.recorder import Recorder


class RunReporter:
    """Tells a recorder. `codec_at`: the codec of a version's way to the devices; None: nobody can say.

    Times are the recorder's, in seconds since the run began.
    """

    def __init__(self, recorder: Recorder, codec_at: Callable[[int], str] | None = None) -> None:
        self._recorder, self._codec_at = recorder, codec_at

    def tell(
        self,
        now: float,
        engine: Engine,
        effects: Iterable[Effect],
        submodel: Submodel | None = None,
    ) -> None:
        """What an event has come to, which `engine` has handled; of an update its part of the model."""
        recorder = self._recorder
        for effect in effects:
            match effect:
                case Granted(task, again=False):
                    share = share_of(task.submodel)
                    recorder.granted(now, task.client_id, task.task_id, task.base_version, share)
                    self._compressed(now, engine, task)
                case Refused():  # nobody's news, and most of what a large fleet is told
                    pass
                case Decided(client_id, receipt, duplicate=True):
                    recorder.note(now, "resent", client=client_id, update=receipt.update_id)
                case Decided():
                    self._decided(now, engine, effect, submodel)
                case Published(version, heard=heard):
                    recorder.published(now, version, heard)
                case LeaseEnded(task, end):
                    told = {"client": task.client_id, "task": task.task_id, "end": end.value}
                    recorder.note(now, "lease_ended", **told)
                case Finished(why, given_up):
                    recorder.finished(now, why, given_up)
                case _:
                    self._ordered(now, effect)

    def _ordered(self, now: float, effect: Effect) -> None:
        """What operators do, or the guard in their place."""
        recorder = self._recorder
        match effect:
            case Barred(client_id, why):
                recorder.note(now, "quarantined", client=client_id, why=why)
            case Unbarred(client_id):
                recorder.note(now, "released", client=client_id)
            case RolledBackTo(version, to_version, left_out, total):
                recorder.rolled_back(now, version, to_version, left_out, total)
            case SettingsSet(changes):
                recorder.set(now, changes)
            case Reopened():
                recorder.reopened(now)
            case MaskSumWanted(number, members=members):
                recorder.note(now, "sum_wanted", cohort=number, updates=len(members))
            case CohortLost(number, update_ids, why):
                recorder.cohort_lost(now, number, len(update_ids), why)

    def _compressed(self, now: float, engine: Engine, task: Task) -> None:
        codecs = engine.ledger.clients[task.client_id].capability.codecs
        if self._codec_at is None or (task.uplink == RAW and not set(STAGES) <= set(codecs)):
            return  # raw may be all that the device can do
        version = task.base_version
        self._recorder.compressed(now, version, task.uplink, self._codec_at(version))

    def _decided(self, now: float, engine: Engine, decided: Decided, submodel: Submodel | None) -> None:
        client_id, receipt, payload = decided.client_id, decided.receipt, decided.payload
        assert payload is not None, "an update that is decided now has come as something"
        self._recorder.decided(
            now,
            client_id,
            receipt.version,
            receipt.decision,
            payload.size_bytes,
            decided.examples,
            decided.raw_bytes,
            decided.metrics,
            receipt.task_id,
            payload.codec,
        )
        if engine.planner is not None and receipt.decision.verdict is not Verdict.REJECTED:
            self._recorder.trained(now, client_id, engine.spec, submodel)
