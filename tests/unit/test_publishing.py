"""`downlink.publish_every_versions`: which versions devices get, and what they are behind."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from anabranch.client.local import LocalServer, LocalTransport
from anabranch.compress.delta_log import DeltaLog
from anabranch.compress.downloads import Downloads, apply_download
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError, UnknownVersion
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.host.build import Blueprint
from anabranch.testing.federation import config, result_of

EVERY = 3
FIRST = {
    "layer.weight": np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64),
    "b": np.ones(3, np.float32),
}
SPEC = ParamSpec.of(FIRST)
CAPABILITY = Capability(codecs=("raw:1", "log:1"))


def settings(strategy: str = "fedbuff", **params: object) -> Config:
    downlink = {"codec": "log(0.5)", "publish_every_versions": EVERY}
    params |= {"buffer_size": 1} if strategy == "fedbuff" else {}
    return config(strategy={"name": strategy, **params}, downlink=downlink)


def motion(count: int) -> list[np.ndarray]:
    draws = np.random.default_rng(5)
    steps = draws.normal(0, 0.01, (count, SPEC.size)).astype(np.float32)
    return list(SPEC.flatten(FIRST) + np.cumsum(steps, axis=0, dtype=np.float32))


def test_the_log_is_that_of_who_sees_every_third_version_only() -> None:
    """To the byte: the versions in between leave no trace but in what the next message has to say."""
    seldom, plain = DeltaLog(SPEC, every=EVERY, versions_max=4), DeltaLog(SPEC, versions_max=4)
    start = SPEC.flatten(FIRST)
    state, reference = seldom.init(start), plain.init(start)
    for version, w in enumerate(motion(30), 1):
        state = seldom.publish(state, version, w, ())
        if version % EVERY == 0:
            reference = plain.publish(reference, version // EVERY, w, ())
        assert seldom.offered(state, version) == version - version % EVERY
        assert (state.version, state.first) == (EVERY * reference.version, EVERY * reference.first)
        assert [e.tobytes() for e in state.entries] == [e.tobytes() for e in reference.entries]
        assert state.replica.tobytes() == reference.replica.tobytes()
    assert state.first == 30 - 4 * EVERY
    for version in range(31):
        ours, theirs = seldom.replica(state, version), plain.replica(reference, version // EVERY)
        if version % EVERY or version < state.first:
            assert ours is None
        else:
            assert ours is not None
            assert theirs is not None
            assert ours.tobytes() == theirs.tobytes()
    published = range(state.first, 31, EVERY)
    for older, newer in [*pairwise(published), (published[0], 30)]:
        message = plain.squash(reference, newer // EVERY, older // EVERY)
        assert seldom.squash(state, newer, older) == message


def test_replicas_that_tasks_mix_with_outlive_the_log() -> None:
    log = DeltaLog(SPEC, every=EVERY, versions_max=2, keeps_replicas=True)
    state, kept = log.init(SPEC.flatten(FIRST)), {}
    for version, w in enumerate(motion(21), 1):
        kept[state.version] = state.replica
        state = log.publish(state, version, w, [0, 6])
    assert (state.first, sorted(state.kept)) == (15, ["0", "6"])
    for version in (0, 6):
        replica = log.replica(state, version)
        assert replica is not None
        assert replica.tobytes() == kept[version].tobytes()
    assert log.replica(state, 3) is None


def test_a_restart_begins_a_new_count() -> None:
    log, start = DeltaLog(SPEC, every=EVERY), SPEC.flatten(FIRST)
    state = log.restart(log.init(start), 4, start, ())
    offered = []
    for version in range(5, 12):
        state = log.publish(state, version, start, ())
        offered.append(log.offered(state, version))
    assert offered == [4, 4, 7, 7, 7, 10, 10]


def test_what_a_device_says_it_holds_is_looked_at() -> None:
    """Nothing leads from a version that was never published, whatever a device says."""
    server = LocalServer(FIRST, settings())
    served(server, 7)
    engine, downloads = server.engine, Downloads(SPEC, {})
    assert (engine.version, engine.offered) == (7, 6)
    for holds, leads in ((0, True), (3, True), (1, False), (5, False), (6, False), (7, False), (99, False)):
        make = downloads.offer(engine, 6, holds)
        assert make is not None
        assert (make().from_version == holds) == leads, holds
    assert downloads.offer(engine, 7, 6) is None
    with pytest.raises(UnknownVersion, match="version 5 is not held"):
        LocalTransport(server, "a").fetch(SPEC.layout_hash, 5)


def served(server: LocalServer, updates: int) -> list[tuple[int, int, float | None]]:
    """One device's updates, one after the other: its base, and the staleness and weight that it was told."""
    server.take(ev.Enrolled(server.clock(), "a", CAPABILITY))
    transport, told = LocalTransport(server, "a"), []
    for turn in range(updates):
        task = transport.ask(Ask("a", f"t-{turn}"), SPEC)
        assert isinstance(task, Task)
        decision = transport.push(result_of(task, SPEC, f"u-{turn}", value=0.01)).decision
        told.append((task.base_version, decision.staleness, decision.weight))
    return told


def test_staleness_counts_every_aggregation() -> None:
    """FedBuff with K = 1: w <- w + (1 + tau)^-1/2 delta, and tau goes 0, 1, 2, 0, 1, 2, ... by hand."""
    server = LocalServer(FIRST, settings())
    told = served(server, 8)
    wanted = [(v - v % EVERY, v % EVERY) for v in range(8)]
    assert [(base, tau) for base, tau, _ in told] == wanted
    assert [weight for _, _, weight in told] == pytest.approx([(1 + tau) ** -0.5 for _, tau in wanted])
    moved = 0.01 * sum((1 + tau) ** -0.5 for _, tau in wanted)
    np.testing.assert_allclose(server.engine.vector, SPEC.flatten(FIRST) + np.float32(moved), atol=1e-6)


def test_an_update_is_mixed_with_what_its_device_had() -> None:
    """FedAsync, alpha = 0.5 whatever the staleness: w <- (1 - a) w + a (p_b + delta), p_b of the base."""
    server = LocalServer(FIRST, settings("fedasync", alpha=0.5, staleness={"name": "constant"}))
    w = SPEC.flatten(FIRST).astype(np.float64)
    server.take(ev.Enrolled(server.clock(), "a", CAPABILITY))
    transport = LocalTransport(server, "a")
    held: tuple[int, Vector] = (-1, w)
    for turn in range(8):
        task = transport.ask(Ask("a", f"t-{turn}"), SPEC)
        assert isinstance(task, Task)
        assert task.base_version == turn - turn % EVERY
        if task.base_version != held[0]:
            came = transport.fetch(SPEC.layout_hash, task.base_version, holds=held[0] if turn else None)
            p, _ = apply_download(SPEC, came.codec, bytes(came.data), came.from_version, held)
            held = task.base_version, p
            assert came.from_version == (turn - EVERY if turn else None)
            assert np.abs(p - w).max() < 0.02, "what was published is near to what the server had then"
        transport.push(result_of(task, SPEC, f"u-{turn}", value=0.01))
        w = 0.5 * w + 0.5 * (held[1] + np.float32(0.01))
        np.testing.assert_allclose(server.engine.vector, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "tables", "why"),
    [
        ("fedbuff", {"downlink": {"codec": "raw"}}, "is for the delta log, and the downlink is 'raw'"),
        ("fedbuff", {"downlink": {"codec": "int8(64)"}}, "is for the delta log"),
        ("fedavg", {}, "works in rounds, and each begins from its own version"),
        ("fedbuff", {"server": {"staleness_max": 2}}, "must be 0 or at least .* 3, not 2"),
        ("fedbuff", {"downlink": {"publish_every_versions": 0}}, "must be greater than 0, not 0"),
    ],
)
def test_what_has_no_use_is_refused(strategy: str, tables: dict[str, Any], why: str) -> None:
    given = settings(strategy).to_json()
    with pytest.raises(ConfigError, match=why):
        Blueprint.of(merge([("base", given), ("test", tables)]), SPEC).engine(FIRST)
