"""A rollback beside the model: sub-models, lossy downlinks, tasks under way, payloads that are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from machines import SPEC
from rollbacks import CLIENTS, Script, World, ask_of, at_version, scripts, seq_of_version

from anabranch.compress.downloads import Downloads, apply_download
from anabranch.core import events as ev
from anabranch.core.effects import Finished, LeaseEnd, LeaseEnded, RolledBackTo
from anabranch.core.engine.invariants import violations
from anabranch.core.errors import StoreCorrupt
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Capability, Reason
from anabranch.core.snapshot import state_digest
from anabranch.host.log import WholeLog

# What comes with a world: sub-models, a lossy downlink, both.
ROUGH: list[tuple[Any, dict[str, Any]]] = [
    (("asyncdrop", {}, {}), {"units": True}),
    (("asyncdrop", {}, {}), {"units": True, "downlink": "log(1,8)"}),
    (("teasq_drop", {"cache_size": 2, "concurrency_fraction": 1.0}, {"rule": "median"}), {"units": True}),
    (("fedasync", {}, {}), {"downlink": "log(2,8)"}),
    (("fedbuff", {"buffer_size": 3}, {"rule": "multi_krum"}), {"downlink": "log(2,8)"}),
    (("teasq", {"cache_size": 3, "concurrency_fraction": 0.5, "mode": "paper"}, {}), {"downlink": "int8"}),
    (("teasq", {"cache_size": 3, "flush_s": 2.0, "concurrency_fraction": 0.5}, {}), {}),
    (("asyncdrop", {}, {}), {"units": True, "lease_s": 2.0, "lease_min_s": 2.0}),
    (("fedbuff", {"buffer_size": 2}, {}), {"concurrency": 2, "staleness_max": 1, "flaws_max": 1}),
]


@pytest.mark.parametrize("rough", ROUGH, ids=lambda r: f"{r[0][0]}-{'-'.join(map(str, r[1].values()))}")
@settings(max_examples=10)
@given(script=scripts)
def test_a_rollback_that_leaves_nothing_out_changes_nothing(rough: Any, script: Script) -> None:
    variant, options = rough
    world = World(*variant, **options)
    world.enrol()
    world.do(ev.Enrolled(0.0, "idle", Capability()))
    world.play(script)
    before = digest(world.engine.vector)
    effects = world.roll_back(0, 0, "idle")
    assert digest(world.engine.vector) == before
    assert violations(world.engine) == []
    (told,) = [e for e in effects if isinstance(e, RolledBackTo)]
    assert told.left_out == 0


@pytest.mark.parametrize("rough", ROUGH, ids=lambda r: f"{r[0][0]}-{'-'.join(map(str, r[1].values()))}")
def test_back_to_a_version_without_everyone_is_that_version(rough: Any) -> None:
    variant, options = rough
    world = World(*variant, **options)
    world.enrol()
    rng = np.random.default_rng(3)
    while world.engine.version < 6:
        world.play([(CLIENTS[rng.integers(4)], 0, float(rng.integers(1, 4))) for _ in range(5)])
    world.play([("a", 9, 1.0)])
    seq, model = at_version(world, 2)
    world.roll_back(2, seq, everyone=True)
    assert digest(world.engine.vector) == model
    assert world.engine.ledger.tasks == {}
    assert world.engine.guard.quarantined == {}
    assert world.engine.pending == []
    assert violations(world.engine) == []


@pytest.mark.parametrize("step", [1, 2])
def test_devices_get_the_model_of_a_rollback_although_the_downlink_is_lossy(step: int) -> None:
    world = World("fedbuff", {"buffer_size": 1}, {}, downlink=f"log({step})")
    world.settings = replace(world.settings, clip=0.0)
    world.engine = world.fresh()
    world.enrol()
    world.play([(c, 0, 1.0) for c in "abd"])
    good = digest(world.engine.vector)
    world.play([("c", 0, 1000.0)])
    world.roll_back(3, seq_of_version(world, 3), "c")
    assert digest(world.engine.vector) == good
    broadcast, version = world.engine.broadcast, world.engine.version
    assert broadcast is not None
    replica = broadcast.replica(world.engine.broadcast_state, version)
    assert replica == pytest.approx(world.engine.vector, rel=2e-3)
    # Who holds the poisoned version, or any other, gets the new one whole.
    downloads = Downloads(SPEC, {})
    for holds in (None, version - 1, version - 2):
        make = downloads.offer(world.engine, version, holds)
        assert make is not None
        made = make()
        got, _ = apply_download(SPEC, made.codec, made.data, made.from_version, None)
        assert (made.codec, digest(got)) == ("logsnapshot", digest(replica))


def test_a_task_that_began_from_the_poison_brings_nothing_of_it_back() -> None:
    world = World("fedasync", {}, {})
    world.enrol()
    world.play([("a", 0, 1.0), ("c", 0, 500.0)])
    world.do(ev.TaskAsked(50.0, ask_of("d", "late")))
    effects = world.roll_back(1, seq_of_version(world, 1), "c")
    (ended,) = [e for e in effects if isinstance(e, LeaseEnded)]
    assert (ended.task.task_id, ended.end) == ("late", LeaseEnd.CANCELLED)
    assert violations(world.engine) == []
    assert world.engine.refusal(ask_of("d", "anew"), 2e4) is None


def test_a_difference_from_the_poison_is_still_taken_by_those_who_add_up() -> None:
    for everyone in (False, True):
        world = World("fedbuff", {"buffer_size": 1}, {})
        world.enrol()
        world.play([("a", 0, 1.0), ("c", 0, 500.0)])
        world.do(ev.TaskAsked(50.0, ask_of("d", "late")))
        world.roll_back(1, seq_of_version(world, 1), "c", everyone=everyone)
        assert ("late" in world.engine.ledger.tasks) is not everyone


def test_who_got_a_task_is_not_decided_anew() -> None:
    """In the fold a client that was put into quarantine for flaws must not hold a place for ever."""
    params = {"buffer_size": 1, "staleness": {"name": "constant"}}
    world = World("fedbuff", params, {}, concurrency=2, flaws_max=1, tasks_per_client=2)
    world.enrol()
    for task in ("flawed", "lost"):
        world.do(ev.TaskAsked(1.0, ask_of("c", task)))
    world.push("flawed", "c", 1.0, 2.0, flaw="no numbers")
    assert "c" in world.engine.guard.quarantined
    for client in "ab":
        world.do(ev.TaskAsked(3.0, ask_of(client, client)))
    for client in "ab":
        world.push(client, client, 1.0, 4.0)
    world.roll_back(0, 0, "d")
    assert (world.engine.vector[0], world.engine.version) == (2.0, 3)


def test_a_payload_that_is_gone_is_named_and_nothing_changes() -> None:
    world = World("fedbuff", {"buffer_size": 1}, {})
    world.enrol()
    world.play([("a", 0, 1.0), ("b", 0, 2.0)])
    before = state_digest(world.engine)

    def gone(payload: ev.Payload) -> bytes:
        raise StoreCorrupt(f"payload {payload.sha256} cannot be read: restore a backup")

    refold = replace(world.refold, log=WholeLog(world.records, gone))
    with pytest.raises(StoreCorrupt, match=r"that of u-t.* is gone: payload .* restore a backup"):
        refold(ev.RolledBack(9.0, 0, 0, ("b",)), len(world.log) + 1, world.engine)
    refold(ev.RolledBack(9.0, 0, 0, ("a", "b")), len(world.log) + 1, world.engine)  # needs none
    assert state_digest(world.engine) == before


def test_a_run_that_has_ended_can_be_rolled_back_and_stays_ended() -> None:
    world = World("fedbuff", {"buffer_size": 1, "staleness": {"name": "constant"}}, {}, updates_max=3)
    world.enrol()
    world.play([("a", 0, 1.0), ("c", 0, 500.0), ("b", 0, 2.0)])
    assert world.engine.finished
    effects = world.roll_back(1, seq_of_version(world, 1), "c")
    assert (world.engine.vector[0], world.engine.version) == (3.0, 4)
    assert not [e for e in effects if isinstance(e, Finished)]
    refused = world.engine.refusal(ask_of("a", "anew"), 2e4)
    assert refused is not None
    assert refused.reason is Reason.RUN_FINISHED
