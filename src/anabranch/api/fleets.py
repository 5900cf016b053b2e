"""`Fleet`: a simulated fleet as an object, in the words of `[fleet]`.

A fleet is grouped here as people think of it: how the data lies on the devices, how fast they are, how they
are connected. Every default is that of the table, and every key of the table has its place
(tests/unit/test_objects.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO

T = TypeVar("T")


def _key(name: str) -> Any:
    """A field that has another name than its key in the table, and that key's default."""
    return field(default=getattr(FleetTable, name), metadata={"key": name})


@dataclass(frozen=True)
class Levels:
    """Step times on evenly spaced levels: the slowest over the fastest, `step_time_s`, is `ratio`."""

    ratio: float = _key("speed_ratio")
    levels: int = _key("speed_levels")
    step_time_s: float = _key("step_time_s")


@dataclass(frozen=True)
class Lognormal:
    """Step times drawn about `step_time_s`: sigma = ln(ratio) / 4. `levels` are groups of equal size."""

    ratio: float = _key("speed_ratio")
    levels: int = _key("speed_levels")
    step_time_s: float = _key("step_time_s")


@dataclass(frozen=True)
class FadasMild:
    """The delay classes of FADAS's published code, Wang et al. 2024, mild ones, drawn for each task.

    `step_time_s`: the seconds of a step that they are factors of.
    """

    step_time_s: float = _key("step_time_s")


@dataclass(frozen=True)
class FadasLarge:
    """The same with large ones."""

    step_time_s: float = _key("step_time_s")


@dataclass(frozen=True)
class Measured:
    """What is known of each device, as `calibrate` finds it: a number for each, in the same order.

    Seconds of a step, the part that a task's steps take less or more, seconds one way, Mbit/s up and down.
    What is empty is the fleet's one; a larger fleet has the same devices again.
    """

    step_times_s: tuple[float, ...]
    spreads: tuple[float, ...] = field(default=(), metadata={"key": "step_spreads"})
    latencies_s: tuple[float, ...] = ()
    up_mbps: tuple[float, ...] = field(default=(), metadata={"key": "up_rates_mbps"})
    down_mbps: tuple[float, ...] = field(default=(), metadata={"key": "down_rates_mbps"})


@dataclass(frozen=True)
class Traced:
    """Step times from the column `step_time_s` of the fleet's `trace`."""


@dataclass(frozen=True)
class Iid:
    """An equal random part of the examples on each device."""


@dataclass(frozen=True)
class Dirichlet:
    """Of every class a share drawn from Dirichlet(alpha), Hsu et al. 2019: small alpha, few classes."""

    alpha: float = _key("dirichlet_alpha")


@dataclass(frozen=True)
class Shards:
    """So many equal runs of the examples sorted by label on each device, McMahan et al. 2017."""

    per_client: int = _key("shards_per_client")


@dataclass(frozen=True)
class SpeedShards:
    """A random half of the examples of the runs that a device's speed group has, Dun et al. 2023."""

    per_client: int = _key("shards_per_client")


@dataclass(frozen=True)
class Draws:
    """So many examples drawn from all, of classes in a mix of each device's own: for very large fleets."""

    examples_per_client: int = _key("examples_per_client")
    alpha: float = _key("dirichlet_alpha")


@dataclass(frozen=True)
class Links:
    """How every device is connected: Mbit/s up and down (0: without a limit), and seconds one way.

    `fetch`: the model of a task is `asked` for, or comes with the task, `unasked`, as on live streams.
    """

    up_mbps: float = FleetTable.up_mbps
    down_mbps: float = FleetTable.down_mbps
    latency_s: float = FleetTable.latency_s
    fetch: str = FleetTable.fetch


@dataclass(frozen=True)
class AllAtOnce:
    """Every device has all its examples from the start."""


@dataclass(frozen=True)
class Arriving:
    """Each device gets its examples while the run goes on, `rate` a second, and keeps the newest `window`.

    `drift`: `none`, `classes` or `rotate`, see docs/simulator.md, "Data that arrive". `window` 0: all.
    """

    rate: float = field(metadata={"key": "arrival_rate"})
    drift: str = _key("arrival_drift")
    window: int = _key("arrival_window")


Speed = Levels | Lognormal | FadasMild | FadasLarge | Measured | Traced
DataSplit = Iid | Dirichlet | Shards | SpeedShards | Draws
Arrival = AllAtOnce | Arriving

SPEEDS: dict[str, type[Any]] = {
    "levels": Levels,
    "lognormal": Lognormal,
    "fadas-mild": FadasMild,
    "fadas-large": FadasLarge,
    "measured": Measured,
    "traced": Traced,
}
SPLITS: dict[str, type[Any]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "speed-shards": SpeedShards,
    "draws": Draws,
}
ARRIVALS: dict[str, type[Any]] = {"all": AllAtOnce, "stream": Arriving}
GROUPS: dict[str, dict[str, type[Any]]] = {"speed": SPEEDS, "split": SPLITS, "arrival": ARRIVALS}


@dataclass(frozen=True)
class Fleet:
    """Simulated devices: see `[fleet]` in docs/configuration.md for every field that is a key of it.

    `split` may also be the name of a split of others, or the place of one of your own,
    `path/to/file.py:split`, and `attack` that of an attack.
    """

    clients: int = FleetTable.clients
    split: DataSplit | str = Iid()
    speed: Speed = Levels()
    links: Links = Links()
    arrival: Arrival = AllAtOnce()
    examples_per_client: int = FleetTable.examples_per_client
    dropout: float = FleetTable.dropout
    availability: float = FleetTable.availability
    availability_period_s: float = FleetTable.availability_period_s
    availability_swing: float = FleetTable.availability_swing
    availability_day_s: float = FleetTable.availability_day_s
    availability_peak_s: float = FleetTable.availability_peak_s
    availability_zones: float = FleetTable.availability_zones
    trace: str = FleetTable.trace
    server_in_mbps: float = FleetTable.server_in_mbps
    server_out_mbps: float = FleetTable.server_out_mbps
    widths_max: tuple[float, ...] = FleetTable.widths_max
    widths_max_by: str = FleetTable.widths_max_by
    train_w: tuple[float, ...] = FleetTable.train_w
    up_j_per_mb: tuple[float, ...] = FleetTable.up_j_per_mb
    down_j_per_mb: tuple[float, ...] = FleetTable.down_j_per_mb
    leavers: float = FleetTable.leavers
    attackers: float = FleetTable.attackers
    attack: str = FleetTable.attack
    attack_strength: float = FleetTable.attack_strength
    submodel_step: str = FleetTable.submodel_step
    waiting: str = FleetTable.waiting
    executor: str = AUTO
    batch_devices: int = FleetTable.batch_devices

    def keys(self) -> dict[str, Any]:
        """Every key of `[fleet]` that this fleet says something of. Raises `ConfigError`."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, kinds in GROUPS.items():
            if name == "split" and isinstance(self.split, str):
                continue
            found |= {name: _name_of(found[name], kinds, name), **_keys(found[name])}
        links = found.pop("links")
        if not isinstance(links, Links):
            raise ConfigError(f"Fleet.links must be Links(...), not {links!r}")
        if self.examples_per_client:
            if isinstance(self.split, Draws) and self.split.examples_per_client not in (
                0,
                self.examples_per_client,
            ):
                raise ConfigError(
                    f"Fleet.examples_per_client is {self.examples_per_client!r}, and split={self.split!r} "
                    "says another number: say it once"
                )
            found["examples_per_client"] = self.examples_per_client
        return {**found, **_keys(links)}

    def whole(self) -> dict[str, Any]:
        """Those keys and all others by default: else what a file says of another kind would be left.

        A split of one's own may read any key of a built-in one, so of these what a file says stays.
        """
        read = {key for kind in SPLITS.values() for key in _names(kind)}
        kept = read if isinstance(self.split, str) else set()
        return {k: v for k, v in asdict(FleetTable()).items() if k not in kept} | self.keys()

    @classmethod
    def of(cls, table: FleetTable) -> Fleet:
        """The fleet of a table. Keys that say nothing of its kinds of split and speed are left out."""
        groups: dict[str, Any] = {
            name: _read(kinds[getattr(table, name)], table)
            for name, kinds in GROUPS.items()
            if getattr(table, name) in kinds
        }
        draws = isinstance(groups.get("split"), Draws)  # which has the number of its examples itself
        own = {f.name: getattr(table, f.name) for f in fields(cls) if hasattr(table, f.name)}
        own |= {"examples_per_client": FleetTable.examples_per_client} if draws else {}
        return cls(**{**own, **groups, "links": _read(Links, table)})


def _name_of(part: Any, kinds: Mapping[str, type[Any]], where: str) -> str:
    for name, kind in kinds.items():
        if isinstance(part, kind):
            return name
    known = ", ".join(f"{kind.__name__}()" for kind in kinds.values())
    raise ConfigError(f"Fleet.{where} must be one of {known}, not {part!r}")


def _keys(part: Any) -> dict[str, Any]:
    return {key: getattr(part, name) for key, name in _names(type(part)).items()}


def _names(kind: Any) -> dict[str, str]:
    """Of each key of the table the name that the kind's field has."""
    return {f.metadata.get("key", f.name): f.name for f in fields(kind)}


def _read(kind: type[T], table: FleetTable) -> T:
    return kind(**{name: getattr(table, key) for key, name in _names(kind).items()})
