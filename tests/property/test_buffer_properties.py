"""Buffers never leave what somebody had: every strategy, rule, codec, sub-model and order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to

from anabranch.compress.broadcast import make_broadcast
from anabranch.compress.downloads import Downloads, apply_download
from anabranch.compress.feedback import Memory, Uplink
from anabranch.compress.layout import Layout
from anabranch.compress.registry import STAGES
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Decided, Granted, Published
from anabranch.core.engine.buffers import AVERAGE, LATEST, LOCAL, Covered, DeviceBuffers
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import Ask, Capability, Task, Update, Verdict, find_flaw
from anabranch.core.rng import stream
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import strategy_of
from anabranch.strategies.submodels.registry import make_planner
from anabranch.workloads.trainer import smaller

UNITS = 5
TENSORS: dict[str, Any] = {
    "first": np.full((UNITS, 3), 0.5, np.float32),
    "mean": np.zeros(UNITS, np.float32),
    "var": np.ones(UNITS, np.float32),
    "second": np.full((2, UNITS), -0.5, np.float32),
    "seen": np.array(0),
    "table": np.full((4, 4), 2.0, np.float32),
}
MEMBERS = Member("first", 0), Member("mean", 0), Member("var", 0), Member("second", 1)
GROUPS = (UnitGroup("hidden", UNITS, MEMBERS),)
BUFFERS = "mean", "var", "table"
WIDE = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in TENSORS.items()}

BOLD = {"server_lr": 4.0, "momentum": 0.9, "buffer_size": 2}
CACHE = {"cache_size": 2, "server_lr": 4.0, "concurrency_fraction": 1.0, "kept": 0.2}
RUNS: dict[str, dict[str, Any]] = {
    "fedasync": {"strategy": {"name": "fedasync"}},
    "fedbuff": {"strategy": {"name": "fedbuff", **BOLD}},
    "fedavg": {"strategy": {"name": "fedavg", "clients_per_round": 2}},
    "fedprox": {"strategy": {"name": "fedprox", "clients_per_round": 2}},
    "qafel": {"strategy": {"name": "qafel", **BOLD}},
    "teasq": {"strategy": {"name": "teasq", **CACHE}},
    "teasq, paper": {"strategy": {"name": "teasq", "mode": "paper", **CACHE}},
    "asyncdrop": {"strategy": {"name": "asyncdrop"}},
    "teasq_drop": {"strategy": {"name": "teasq_drop", **CACHE}},
    "teasq_drop, paper": {"strategy": {"name": "teasq_drop", "mode": "paper", **CACHE}},
    "fedavg, heterofl": {
        "strategy": {"name": "fedavg", "clients_per_round": 2},
        "submodel": {"name": "heterofl"},
    },
    "a chain down": {"strategy": {"name": "fedasync"}, "downlink": {"codec": "int4(32)"}},
    "top-k": {"strategy": {"name": "fedbuff", **BOLD}, "uplink": {"codec": "ef(0.9)|topk(0.1)|int8"}},
    "a threshold": {"strategy": {"name": "fedavg"}, "uplink": {"codec": "threshold(0.1)|int4|gaps|zstd"}},
    "a clip": {"strategy": {"name": "fedbuff", **BOLD}, "robust": {"clip": 0.5}},
    "a median": {"strategy": {"name": "fedbuff", **BOLD}, "robust": {"rule": "median"}},
    "centred": {
        "strategy": {"name": "fedbuff", **BOLD},
        "robust": {"rule": "centred_clipping", "radius": 1.0},
    },
    "krum": {"strategy": {"name": "teasq", **CACHE, "cache_size": 4}, "robust": {"rule": "krum"}},
}


@dataclass
class Device:
    """What one device has: its tasks with what they start from, and what it remembers."""

    tasks: list[tuple[Task, Vector]] = field(default_factory=list)
    memory: Memory | None = None
    own: bytes = b""


class Federation:
    """An engine, devices that reach whatever they are told to, and the test's own account of buffers."""

    def __init__(self, tables: dict[str, Any], policy: str, tensors: dict[str, Any]) -> None:
        server = {"tasks_per_client": 3, "lease_s": 5.0, "lease_min_s": 5.0}
        self.config: Config = merge([("test", {"server": server, "model": {"buffers": policy}, **tables})])
        self.policy, self.spec = policy, ParamSpec.of(tensors, GROUPS, BUFFERS)
        self.at = self.spec.buffer_places
        self.engine = self._engine(self.spec.flatten(tensors))
        self.downloads = Downloads(self.spec, self.spec.frozen(tensors))
        self.devices = [Device() for _ in range(3)]
        self.now, self.count = 0.0, 0
        self.seen = [self.buffers]  # current values, and those reached since
        self.newest = self.buffers  # of each the value that was reached last
        for c in range(len(self.devices)):
            self.engine.handle(ev.Enrolled(0.0, f"c{c}", Capability(codecs=STAGES)))

    def _engine(self, vector: Vector) -> Engine:
        strategy = strategy_of(self.config)
        broadcast = make_broadcast(self.spec, strategy, self.config.downlink.codec)
        planner = make_planner(self.spec, strategy, self.config)
        return Engine(self.spec, strategy, EngineSettings.of(self.config), vector, broadcast, planner)

    @property
    def buffers(self) -> Vector:
        return self.engine.vector[self.at].copy()

    def ask(self, c: int) -> None:
        self.count += 1
        version = self.engine.version
        for effect in self._handle(ev.TaskAsked(self.now, Ask(f"c{c}", f"t{self.count}"))):
            if isinstance(effect, Granted):
                offer = self.downloads.offer(self.engine, version, None, STAGES)
                assert offer is not None
                made = offer()
                model, _ = apply_download(self.spec, made.codec, made.data, None, None)
                exact = self.engine.vector[self.at].astype(np.float32)  # a grid is of float32
                np.testing.assert_array_equal(model[self.at].astype(np.float32), exact)
                self.devices[c].tasks.append((effect.task, model))

    def push(self, c: int, which: int, scale: float) -> None:
        """The result of a task that has reached `scale` times random buffers, none below zero."""
        device = self.devices[c]
        if not device.tasks:
            return
        task, model = device.tasks.pop(which % len(device.tasks))
        covered, part, sides = Covered.of(self.spec, task.submodel), smaller(task), DeviceBuffers
        side = sides(self.spec, self.policy)
        start = side.start(model if part is None else model[part.indices], part, device.own)
        self.count += 1
        draws = stream(self.count, "property")
        delta = draws.normal(0.0, scale, start.size).astype(start.dtype)
        wanted = (scale * draws.random(covered.at.size)).astype(start.dtype)
        delta[covered.at] = wanted - start[covered.at]
        told, device.own = side.told(start, delta, task.submodel, device.own)
        uplink = Uplink(task.uplink)
        data, memory = uplink.encode(told, self.spec, task.submodel, device.memory, 1, task.base_version)
        found = uplink.codec.decode(data, Layout.of(self.spec, task.submodel))
        assert find_flaw(self.spec, found, 1, task.submodel) is None
        if memory is not None and memory.residual.size:
            assert not memory.residual[self.at].any(), "nothing of a buffer is ever left out"
        update = Update(f"u{self.count}", task.task_id, f"c{c}", task.base_version, 1, found, task.submodel)
        event = ev.UpdateArrived(self.now, update, ev.Payload("", len(data), uplink.codec.text))
        reached, newest = self.buffers, self.newest.copy()
        reached[covered.which] = newest[covered.which] = told[covered.at]
        self._handle(event, reached, newest)
        device.memory = memory or device.memory

    def pass_time(self) -> None:
        self.now += 3.0
        self._handle(ev.Ticked(self.now))

    def restart(self) -> None:
        """The server comes back from a snapshot."""
        before = state_digest(self.engine)
        e = self.engine
        parts = e.spec, e.strategy, e.settings, e.broadcast, e.planner
        self.engine = restore(take_snapshot(e), *parts)
        assert state_digest(self.engine) == before

    def _handle(
        self, event: ev.Event, reached: Vector | None = None, newest: Vector | None = None
    ) -> list[Any]:
        before = self.buffers
        effects = self.engine.handle(event)
        decided = [e for e in effects if isinstance(e, Decided)]
        if decided and reached is not None and decided[0].receipt.decision.verdict is not Verdict.REJECTED:
            self.seen.append(reached)
            self.newest = self.newest if newest is None else newest
        if any(isinstance(e, Published) for e in effects):
            self._check(before)
            self.seen, self.newest = [self.buffers], self.buffers
        return effects

    def _check(self, before: Vector) -> None:
        """The oracle: by all that was told since the version before."""
        found = self.buffers
        assert (found >= 0).all()
        assert (found >= np.min(self.seen, axis=0)).all()
        assert (found <= np.max(self.seen, axis=0)).all()
        if self.policy == LATEST:
            np.testing.assert_array_equal(found, self.newest)
        if self.policy == LOCAL:
            np.testing.assert_array_equal(found, before)
        for device in self.devices:
            if device.own:
                kept = np.frombuffer(device.own, self.spec.vector_dtype)
                assert not (kept < 0).any()


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 2), st.sampled_from([1e-6, 1.0, 1e4])),
    st.tuples(st.just("pass_time")),
    st.tuples(st.just("restart")),
)


def play(federation: Federation, actions: list[tuple[Any, ...]]) -> None:
    for c in range(3):
        federation.ask(c)
    for name, *arguments in actions:
        getattr(federation, name)(*arguments)
    for c in range(3):  # what is under way comes late
        federation.push(c, 0, 1.0)


@pytest.mark.parametrize("run", RUNS)
@given(actions=lists_up_to(25, ACTIONS), policy=st.sampled_from([AVERAGE, LATEST, LOCAL]))
@settings(max_examples=20, deadline=None)
def test_buffers_stay_within_what_somebody_had(run: str, actions: list[tuple[Any, ...]], policy: str) -> None:
    play(Federation(RUNS[run], policy, TENSORS), actions)


@pytest.mark.parametrize("run", ["fedbuff", "teasq", "top-k", "a chain down", "qafel"])
@given(actions=lists_up_to(25, ACTIONS))
@settings(max_examples=20, deadline=None)
def test_the_same_in_double_precision(run: str, actions: list[tuple[Any, ...]]) -> None:
    play(Federation(RUNS[run], AVERAGE, WIDE), actions)
