"""Settings as nobody chose them: each drawn by itself, and again until they go together.

What has a table of tests of its own (`combination_table.py`, `rough.py`) goes by pairs; here all meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any, TypeVar

from kept_state import SPEC, config_of

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.host.build import Blueprint
from anabranch.simulation.attacks import BUILT_IN as ATTACKS
from anabranch.simulation.run import open_simulation
from anabranch.strategies.optimisers import OPTIMISERS
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.robust.registry import BUILT_IN as RULES
from anabranch.strategies.submodels.registry import BUILT_IN as PLANNERS
from anabranch.support.shelf import ScratchShelf
from anabranch.testing.models import tensors

T = TypeVar("T")
Tables = dict[str, dict[str, Any]]

PHASED = "phased"
NAMES = [name for name in STRATEGIES.built_in if name != PHASED]
BUFFERS = ("annealed", "ca2fl", "delayed_nesterov", "fadas", "fedbuff", "port", "qafel")
OUTER = [{"name": name, "lr": lr} for name in OPTIMISERS for lr in (1.0, 0.05)]
STALENESS = [{"name": "constant"}, {"name": "polynomial", "a": 0.5}, {"name": "hinge", "a": 2.0, "b": 2.0}]
Parameters = Mapping[str, Sequence[Any]]
REMEMBERING: Parameters = {"memory": ("ram", "disk")}
GATHERING: Parameters = {"flush_s": (0.5, 3.0), "outer": OUTER, "staleness": STALENESS}
ROUNDS: Parameters = {"over_selection": (1.0, 2.0), "outer": OUTER}
CACHING: Parameters = {
    "cache_size": (1, 2, 4),
    "kept": (0.05, 1.0),
    "bits": (4, 8),
    "mode": ("robust", "paper"),
    "decay_every": (0, 3),
    "decay_direction": ("milder", "stronger"),
    "downlink_step": (2.0, 0.5),
}
PARAMETERS: Mapping[str, Parameters] = {
    "ace": REMEMBERING,
    "aced": REMEMBERING,
    "annealed": GATHERING,
    "ca2fl": REMEMBERING,
    "fedasync": {"alpha": (0.3,), "staleness": STALENESS},
    "fedavg": ROUNDS,
    "fedbuff": GATHERING,
    "fedcompass": {"steps_min": (1,), "steps_max": (1, 4), "staleness": STALENESS},
    "fedfa": {"window_size": (1, 4)},
    "fedprox": ROUNDS,
    "port": {"staleness_bound": (1.0, 4.0), "flush_s": (0.5,)},
    "qafel": GATHERING,
    "teasq": CACHING,
    "teasq_drop": CACHING,
    "waves": GATHERING,
}
CHAINS = [
    *("raw", "f32", "bf16|zstd", "int8(32,sr)", "int4(64)|huffman", "e3m0|zstd", "mask(0.3)|int4"),
    *("topk(0.2)|int8|gaps|zstd", "threshold(0.2)|bf16|bitmap", "deadzone(0.2)|gaps|huffman"),
]
UPLINKS = [f"{front}{chain}" for front in ("", "ef(0.9)|", "momentum(0.5)|") for chain in CHAINS]
# What a server reads, and a simulation as well; each is said in one of five runs.
SERVER: dict[str, Sequence[Any]] = {
    "uplink.codec": UPLINKS,
    "downlink.codec": ("raw", "bf16", "int8|zstd", "log(2)", "log(0.5)", "log(1,4)"),
    "downlink.publish_every_versions": (2, 3),
    "downlink.parts": ("own",),
    "submodel.name": ("none", *PLANNERS),
    "submodel.parts": (2, 3),
    "submodel.pattern": ("strided", "sequential"),
    "submodel.drop": (0.5,),
    "submodel.period": (1, 2),
    "submodel.coverage_versions": (0, 2),
    "robust.rule": tuple(RULES),
    "robust.clip": (0.0, 2.0),
    "robust.buffer_max": (1,),
    "robust.window_max": (2,),
    "robust.flaws_max": (2,),
    "server.staleness_max": (1, 3),
    "server.tasks_per_client": (2, 3),
    "server.upload_now_versions": (1, 3),
    "server.snapshot_every_versions": (1, 3),
    "model.buffers": ("latest", "local"),
}
SIMULATION: dict[str, Sequence[Any]] = {
    "run.updates_max": (5, 30),
    "run.versions_max": (3, 12),
    "run.evaluate_every_versions": (1, 3),
    "run.payload_digest": ("blake3",),
    "run.initial": ("built",),
    "fleet.split": ("dirichlet", "shards", "speed-shards", "draws"),
    "fleet.speed": ("lognormal", "fadas-mild"),
    "fleet.speed_ratio": (1.0, 20.0),
    "fleet.up_mbps": (0.1, 1.0),
    "fleet.down_mbps": (0.1, 1.0),
    "fleet.server_in_mbps": (0.2,),
    "fleet.server_out_mbps": (0.2,),
    "fleet.latency_s": (0.0, 0.5),
    "fleet.dropout": (0.2, 0.6),
    "fleet.availability": (0.7, 0.3),
    "fleet.leavers": (0.3,),
    "fleet.waiting": ("ask", "called"),
    "fleet.fetch": ("unasked",),
    "fleet.submodel_step": ("whole",),
    "fleet.widths_max": ((1.0, 0.5),),
    "client.steps": (1, 4),
    "client.momentum": (0.5,),
    "client.weight_decay": (0.01,),
    "client.gradient": ("zeroth",),
    "client.push": ("overlap", "elastic"),
    "client.push_when": ("interval", "change", "advised"),
    "client.merge": ("paper-interpolation", "blend"),
    "server.concurrency": (1, 3),
    "server.lapsed": ("lot",),
    "server.windows": ("tasks", "minute"),
}
FAULTS: dict[str, Sequence[Any]] = {
    "faults.loss": (0.1, 0.3),
    "faults.duplication": (0.2,),
    "faults.reordering": (0.2,),
    "faults.delay": (0.3,),
    "faults.delay_shape": ("fixed", "pareto"),
    "faults.partition_every_s": (4.0,),
    "faults.swizzle_every_s": (5.0,),
    "faults.device_crash_every_s": (4.0,),
    "faults.server_crash_every_s": (3.0, 8.0),
    "faults.skew_s": (3.0,),
    "faults.drift": (0.1,),
    "faults.clock_step_every_s": (5.0,),
    "faults.disk_full_every_s": (5.0,),
    "faults.restore_every_s": (5.0,),
    "faults.device_copy_every_s": (5.0,),
    "faults.torn_tail": (0.5,),
    "faults.lost_tail": (0.3,),
}
LENGTHS = {
    **{f"{what}_s": 2.0 for what in ("partition", "swizzle", "device_down", "server_down", "disk_full")},
    "restore_age_s": 2.0,
    "device_copy_s": 3.0,
    "timeout_s": 2.0,
    "delay_s": 0.5,
}
OFTEN, SELDOM = 0.5, 0.15


def simulated(seed: int) -> Config:
    """Of a small fleet on the synthetic problem, which nothing refuses."""

    def opened(tables: Tables) -> Config:
        settings = merge([("drawn", tables)])
        with open_simulation(settings):
            return settings

    return _first(f"simulated {seed}", _of_a_simulation, opened)


def served(seed: int) -> Tables:
    """Of a server of the kept states' model, which nothing refuses."""

    def begun(tables: Tables) -> Tables:
        blueprint = Blueprint.of(config_of("", tables), SPEC, key=bytes(32), shelf=ScratchShelf())
        blueprint.engine(tensors())
        return tables

    return _first(f"served {seed}", _of_a_server, begun)


def _first(name: str, draw: Callable[[Random], Tables], tried: Callable[[Tables], T]) -> T:
    for number in count():
        try:
            return tried(draw(Random(f"{name} {number}")))
        except ConfigError:
            continue
    raise AssertionError("never: there is always another")


def _of_a_server(random: Random) -> Tables:
    tables: Tables = {"strategy": _strategy(random), "fleet": {"clients": 7}}
    _say(random, tables, SERVER)
    _say_privacy(random, tables)
    if random.random() < OFTEN:
        _put(tables, "server.keep", random.choice(["versions:1", "versions:2", "days:1"]))
    return tables


def _of_a_simulation(random: Random) -> Tables:
    tables: Tables = {
        "run": {"workload": "synthetic", "seed": random.randrange(10**6), "virtual_s_max": 15.0},
        "fleet": {"clients": random.randint(2, 7), "examples_per_client": random.choice([8, 33, 64])},
        "strategy": _strategy(random),
        "client": {"batch_size": random.choice([8, 32])},
    }
    _say(random, tables, {**SERVER, **SIMULATION})
    _say_privacy(random, tables)
    if random.random() < SELDOM:
        named = {"mode": "keeper", "keepers": ["ada", "bo"], "cohort_min": 2}
        tables["secagg"] = named if "privacy" in tables else {**named, "clip": 1.0}
    if random.random() < SELDOM:
        tables["fleet"] |= {"attackers": 0.3, "attack": random.choice(list(ATTACKS))}
    if random.random() < SELDOM:
        tables["fleet"] |= {"arrival": "stream", "arrival_rate": random.choice([2.0, 10.0])}
    if random.random() < OFTEN:
        _say(random, tables, FAULTS)
        tables.setdefault("faults", {}).update(LENGTHS)
    return tables


def _say(random: Random, tables: Tables, settings: Mapping[str, Sequence[Any]]) -> None:
    for path, values in settings.items():
        if random.random() < 0.2:
            _put(tables, path, random.choice(values))


def _put(tables: Tables, path: str, value: Any) -> None:
    table, _, key = path.partition(".")
    tables.setdefault(table, {})[key] = value


def _say_privacy(random: Random, tables: Tables) -> None:
    if random.random() < SELDOM:
        said = {"participations": random.choice([2, 100]), "separation": random.choice([1, 2])}
        tables["privacy"] = {"clip": 1.0, "noise": 0.5, **said}
        _put(tables, "model.buffers", "local")


def _strategy(random: Random) -> dict[str, Any]:
    if random.random() > SELDOM:
        return _one(random, "name")
    untils = sorted(random.sample(range(1, 9), 2))
    parts = [{**_one(random, "strategy"), "until_versions": until} for until in untils]
    return {"name": PHASED, "phases": [*parts, _one(random, "strategy")]}


def _one(random: Random, key: str) -> dict[str, Any]:
    """A strategy under its key, with some of its parameters."""
    name = random.choice(NAMES)
    made: dict[str, Any] = {key: name}
    if name in BUFFERS:
        made["buffer_size"] = random.randint(1, 4)
    if name in ("fedavg", "fedprox"):
        made |= {"clients_per_round": random.randint(1, 4), "deadline_s": random.choice([3.0, 20.0])}
    for parameter, values in PARAMETERS.get(name, {}).items():
        if random.random() < 0.3:
            made[parameter] = random.choice(values)
    if random.random() < SELDOM:
        made["scheduler"] = random.choice([{"name": "equal_time"}, {"name": "fedluck"}])
    return made
