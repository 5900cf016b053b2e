"""The configuration of a run: one TOML file, frozen dataclasses, every value with its source.

Precedence: defaults < TOML < `ANABRANCH_<TABLE>_<KEY>` < flags. An unknown key is an error that
names the nearest one. The files and the environment are read by the command line; this module
only merges and checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from cattrs import Converter
from cattrs.gen import override

from anabranch.core.config.caps import fitted
from anabranch.core.config.faults import FaultsTable
from anabranch.core.config.flower import FlowerTable
from anabranch.core.config.goal import NO_TARGET
from anabranch.core.config.model import ModelTable
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.config.ranges import (
    ASKED,
    BY_SPEED,
    EXACT,
    LINEAR,
    LOT,
    MINUTE,
    PLACES,
    PROPORTIONAL,
    SERVED,
    TASK,
    TURNS,
    WHOLE_VERSIONS,
    check_ranges,
)
from anabranch.core.config.ray import RayTable
from anabranch.core.config.secagg import SecaggTable
from anabranch.core.config.secrets import SECRET, masked
from anabranch.core.config.toml import toml_text
from anabranch.core.content import SHA256
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import UPGRADE, ConfigError, StoreNewer
from anabranch.core.later import LATER_KEY
from anabranch.core.limits import UPLOAD_BYTES_PER_CLIENT, Limits
from anabranch.core.model.chains import AUTO
from anabranch.core.plain import (
    FieldError,
    finite,
    from_plain,
    make_converter,
    of_python,
    real,
    written,
)
from anabranch.core.rules import NEWEST
from anabranch.core.spelling import did_you_mean

T = TypeVar("T")

ENVIRONMENT = "ANABRANCH_"  # begins the names of variables, and so of sources, that say a setting
TYPED = "--set"  # the source of what somebody has just typed
NO_KEY = {"key": False}  # the metadata of a field that is no key of its table: others set it


@dataclass(frozen=True)
class RunTable:
    """`[run]`: what is learned, from which seed, and when it ends. A budget of 0 is no budget.

    `rejections_max`: the run is given up when so many updates in a row cannot be used. The run is judged by
    `metric`, which the App's `evaluate` returns (`auto`: the accuracy, or else the loss); `mode` says whether
    more of it (`max`) or less (`min`) is better, `target` is a value of it. With `stop_at_target` the run
    ends with the first measurement that is as good. `trackers` are told of the run as it goes on. `initial`:
    version 0 is `sent` to devices, or `built` by each of them from the App and the seed (`host/first.py`).
    `frozen`: what is frozen of the model is `served` to devices that have not got it, or `local`: every
    device builds it, or is refused. `payload_digest`: what devices that can are to name their updates by
    (`core/content.py`); the others go on with SHA-256. `none`: simulated updates have no names. `rules`: by
    which the server computes, of older releases or of this one (`core/rules.py`).
    """

    name: str = "run"
    seed: int = 0
    workload: str = "digits"
    data_path: str = field(default="", repr=False, metadata=SECRET)
    target_accuracy: float = 0.0
    versions_max: int = 0
    updates_max: int = 0
    rejections_max: int = 100
    virtual_s_max: float = 0.0
    evaluate_every_s: float = 0.0
    evaluate_every_versions: int = 1
    evaluate_on: str = "test"
    keep_payloads: bool = True
    metric: str = field(default=AUTO, metadata=LATER_KEY)
    mode: str = field(default=AUTO, metadata=LATER_KEY)
    target: float | str = field(default=NO_TARGET, metadata=LATER_KEY)
    stop_at_target: bool = field(default=False, metadata=LATER_KEY)
    trackers: list[str] = field(default_factory=list, metadata=LATER_KEY)
    initial: str = field(default="sent", metadata=LATER_KEY)
    frozen: str = field(default=SERVED, metadata=LATER_KEY)
    payload_digest: str = field(default=SHA256, metadata=LATER_KEY)
    rules: int = NEWEST


@dataclass(frozen=True)
class FleetTable:
    """`[fleet]`: how many devices, how the data lies on them, how fast and how reliable they are.

    `speed`: `levels` (evenly spaced step times, slowest/fastest = `speed_ratio`), `lognormal`
    (sigma = ln(speed_ratio) / 4), `fadas-mild`, `fadas-large` (the FADAS delay classes), `measured`: device
    by device, as `anabranch calibrate` writes it. Then `step_times_s` has a number for each device, and so
    may `step_spreads` (a task's steps take this part less or more), `latencies_s`, `up_rates_mbps` and
    `down_rates_mbps` in the place of the fleet's one; a larger fleet has the same devices again.
    `split`: `iid`, `dirichlet`, `shards`, `speed-shards`, `draws`. `leavers`: the fraction of devices that
    leave for good, each at a random moment of `run.virtual_s_max`. `submodel_step`: a step of a sub-model
    takes its share of the whole model's operations (`operations`), or as long as the whole model's
    (`whole`). Simulated devices that were refused ask again like live ones (`waiting`: `ask`), or sleep
    until there is room (`called`); `auto`: the latter where they are more than a live server's line has
    places for. `executor` does the training of a simulation, `batch_devices` at a time where it is in stacks.
    The fraction `attackers` of simulated devices sends what `attack` makes of its updates, as strong as
    `attack_strength` says (0: as the attack does itself). Where `arrival` is `stream`, simulated devices'
    examples come one after the other, `arrival_rate` a second, in an order by `arrival_drift`, and a device
    keeps the newest `arrival_window` of them (0: all): see `workloads/arrival.py`.
    With `availability_swing` the fraction of the devices that is there follows the day, of
    `availability_day_s`: it is `availability` (1 + swing cos), the most at `availability_peak_s`; the peaks
    of the devices lie within `availability_zones` of a day. `trace` is a file that says of each device when
    it is there and how its link is (`workloads/traces.py`), and with `speed` = `traced` what a step takes.
    All devices together send and fetch no more than `server_in_mbps` and `server_out_mbps` (0: no limit),
    which those that do so at a time share.
    `fetch`: a simulated device asks for the model of its task (`asked`), or the server sends it with the
    task (`unasked`), as live ones have it over a stream: a round trip less.
    `widths_max`: how much of the model devices' memories bear, as shares of its units, dealt by
    `widths_max_by`: `speed`, each number to as many speed groups, the first to the fastest, or `chance`.
    Empty: all bear the whole model. A trace's `width_max` goes before it.
    `train_w`, `up_j_per_mb` and `down_j_per_mb`: what devices spend while they train, and for a MB of bytes
    sent and received, dealt to speed groups as well; empty: not known, and not counted
    (`reports/energy.py`). A trace's columns of the same names go before them.
    """

    clients: int = 8
    split: str = "iid"
    dirichlet_alpha: float = 0.3
    shards_per_client: int = 2
    examples_per_client: int = 0
    speed: str = "levels"
    speed_ratio: float = 5.0
    speed_levels: int = 8
    step_time_s: float = 0.1
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    latency_s: float = 0.05
    dropout: float = 0.0
    availability: float = 1.0
    availability_period_s: float = 600.0
    leavers: float = 0.0
    submodel_step: str = "operations"
    waiting: str = AUTO
    executor: str = AUTO
    batch_devices: int = 64
    attackers: float = 0.0
    attack: str = "sign_flip"
    attack_strength: float = 0.0
    arrival: str = field(default="all", metadata=LATER_KEY)
    arrival_rate: float = field(default=0.0, metadata=LATER_KEY)
    arrival_drift: str = field(default="none", metadata=LATER_KEY)
    arrival_window: int = field(default=0, metadata=LATER_KEY)
    step_times_s: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    step_spreads: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    latencies_s: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    up_rates_mbps: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    down_rates_mbps: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    availability_swing: float = field(default=0.0, metadata=LATER_KEY)
    availability_day_s: float = field(default=86_400.0, metadata=LATER_KEY)
    availability_peak_s: float = field(default=0.0, metadata=LATER_KEY)
    availability_zones: float = field(default=0.0, metadata=LATER_KEY)
    trace: str = field(default="", metadata=LATER_KEY)
    server_in_mbps: float = field(default=0.0, metadata=LATER_KEY)
    server_out_mbps: float = field(default=0.0, metadata=LATER_KEY)
    fetch: str = field(default=ASKED, metadata=LATER_KEY)
    widths_max: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    widths_max_by: str = field(default=BY_SPEED, metadata=LATER_KEY)
    train_w: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    up_j_per_mb: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    down_j_per_mb: tuple[float, ...] = field(default=(), metadata=LATER_KEY)


@dataclass(frozen=True)
class StrategyTable:
    """`[strategy]`: the name, and the parameters that the strategy itself declares."""

    name: str = "fedbuff"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SubmodelTable:
    """`[submodel]`: how a device's part of the model is chosen.

    `auto` is the strategy's own choice, `none` the whole model. `drop` is for `random` and `hetero`: the
    fraction of the units of each group that are left out. `widths` are for `heterofl`, `fedrolex` and
    `fjord`: the fractions that are kept, by the device's speed. `parts` is for `ist` and `fragments`; by
    `pattern` these deal the model's blocks to them. A unit that no update has touched for more than
    `coverage_versions` versions goes into every sub-model (0: no such guard). `step_time`: what a device's
    step is taken to last by its part, for `widths`: a + b x; `proportional` in runs of older releases.
    `grow_at`: where the stages of `progressive` begin, but for the first, as shares of the run's versions
    (none: evenly, up to .375); for `warm_up_versions` of each what is new is trained alone. `turns` of
    `alternate` are patterns of tensors' names, a set each (none: the halves of adapters), for `period`
    versions each.
    """

    name: str = AUTO
    drop: float = 0.25
    widths: list[float] = field(default_factory=lambda: [1.0, 0.875, 0.75, 0.625, 0.5])
    parts: int = 4
    coverage_versions: int = 50
    pattern: str = field(default="balanced", metadata=LATER_KEY)
    step_time: str = LINEAR
    grow_at: tuple[float, ...] = field(default=(), metadata=LATER_KEY)
    warm_up_versions: int = field(default=25, metadata=LATER_KEY)
    turns: tuple[str, ...] = field(default=(), metadata=LATER_KEY)
    period: int = field(default=4, metadata=LATER_KEY)


@dataclass(frozen=True)
class UplinkTable:
    """`[uplink]`: the codec chain of updates; `auto` is the strategy's own choice, else `raw`.

    `ef(beta)|...` gives devices error feedback with that decay. `stages`: codec stages of one's own, each
    `path/to/file.py:Class`, by whose names chains may then have them; devices need them too (`--part`).
    """

    codec: str = AUTO
    stages: list[str] = field(default_factory=list, metadata=LATER_KEY)


@dataclass(frozen=True)
class DownlinkTable:
    """`[downlink]`: how published models travel; `auto` is the strategy's own choice, else `raw`.

    A chain encodes each version by itself; `log(step)` is the shared delta log, to which every
    `publish_every_versions`-th version goes: devices train from the newest that is in it. Of the log a device
    of sub-models gets every part (`whole`), or that of its task (`own`).
    """

    codec: str = AUTO
    publish_every_versions: int = field(default=1, metadata=LATER_KEY)
    parts: str = field(default=WHOLE_VERSIONS, metadata=LATER_KEY)


@dataclass(frozen=True)
class ServerTable:
    """`[server]`: where it listens, where it keeps its data, whom it lets in and how long for.

    `concurrency` caps the devices in training at a time (0: no cap). `staleness_max` rejects older
    updates (0: no bound). A lease lasts 3 times the device's own mean task time, within the bounds; it is
    renewed for at most `tenure_leases` times its length while others wait for a place (0: no bound). Devices
    whose tasks came to nothing again share a few of the places then, in `turns`; `lapsed` is `lot` for
    simulations of older releases, where the first to come had them. When who waits comes
    back goes by since when the `places` are held: `windows`; simulations of older releases have `tasks` and
    `minute` there (`core/engine/pace.py`). A device
    whose task is `upload_now_versions` behind is advised to push what it has (0: never). Its updates on their
    way, and what has come of those that were cut, are `upload_bytes_per_client` at most. A `standby` waits
    while another server leads the run, and takes over from one that is silent for `leader_lease_s`.
    On `metrics_address` Prometheus reads how it does (empty: nobody does).
    `keep`: how much of the log is kept, see `retention.py`; what goes is put into `archive`, if that is set.
    `data_dir` holds `disk_bytes_max` at most (0: as much as the disk), or nothing more is taken.
    `keepers`: the addresses at which those of `[secagg]` are asked for masks, `host:port` each, in any order.
    """

    address: str = "127.0.0.1:7070"
    admin_address: str = "127.0.0.1:7071"
    metrics_address: str = field(default="", metadata=LATER_KEY)
    keepers: list[str] = field(default_factory=list, metadata=LATER_KEY)
    database: str = field(default="", repr=False, metadata=SECRET)
    data_dir: str = "anabranch-data"
    concurrency: int = 0
    staleness_max: int = 0
    lease_s: float = 60.0
    lease_min_s: float = 10.0
    lease_max_s: float = 3600.0
    tasks_per_client: int = 1
    tenure_leases: float = 5.0
    lapsed: str = TURNS
    windows: str = PLACES
    upload_now_versions: int = 0
    upload_bytes_per_client: int = UPLOAD_BYTES_PER_CLIENT
    retry_after_min_s: float = 0.5
    retry_after_max_s: float = 2.0
    snapshot_every_versions: int = 50
    snapshot_every_updates: int = 500
    snapshot_every_events: int = 5000
    keep: str = "all"
    archive: str = field(default="", metadata=LATER_KEY)
    disk_bytes_max: int = field(default=0, metadata=LATER_KEY)
    drain_s: float = 20.0
    standby: bool = False
    leader_lease_s: float = 10.0


@dataclass(frozen=True)
class IdentityTable:
    """`[identity]`: who may speak to the server, where other machines reach it.

    `tls`: `auto` guards every address that is not loopback, `always` those as well. `join_address` empty: on
    the host of `server.address`, two ports further. Devices and the server renew their certificates by
    themselves at two thirds of `certificate_s`.
    """

    folder: str = "anabranch-identity"
    tls: str = "auto"
    join_address: str = ""
    certificate_s: float = 604800.0


@dataclass(frozen=True)
class ClientTable:
    """`[client]`: local training, and how the agent behaves.

    `connection`: `stream` has a device's requests go over one stream, `calls` as a call each; `auto` is the
    stream, and calls wherever it does not get through.

    `gradient`: `zeroth` trains by losses alone, see `workloads/zeroth.py`; the keys after it say how.

    `push`: `task` sends a result before the next task is asked for, `overlap` while it is trained; with
    `elastic` devices train on, and the keys after it say when they push and how they merge.
    """

    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    precision: str = "auto"
    device: str = "auto"
    retry_base_s: float = 0.5
    retry_cap_s: float = 60.0
    connection: str = field(default=AUTO, metadata=LATER_KEY)
    gradient: str = field(default=EXACT, metadata=LATER_KEY)
    gradient_eps: float = field(default=1e-3, metadata=LATER_KEY)
    gradient_max: float = field(default=0.0, metadata=LATER_KEY)
    gradient_queries: int = field(default=1, metadata=LATER_KEY)
    push: str = TASK
    push_when: str = "continuous"
    push_steps: int = 10
    push_steps_max: int = 200
    push_duty: float = 0.5
    push_change: float = 0.3
    merge: str = "delta"
    merge_weight: float = 0.5


@dataclass(frozen=True)
class Config:
    """A whole configuration. `sources` says where each value that is no default came from."""

    run: RunTable = field(default_factory=RunTable)
    fleet: FleetTable = FleetTable()
    ray: RayTable = field(default_factory=RayTable)
    strategy: StrategyTable = StrategyTable()
    model: ModelTable = field(default_factory=ModelTable)
    submodel: SubmodelTable = SubmodelTable()
    robust: RobustTable = field(default_factory=RobustTable)
    privacy: PrivacyTable = field(default_factory=PrivacyTable)
    secagg: SecaggTable = field(default_factory=SecaggTable)
    uplink: UplinkTable = field(default_factory=UplinkTable)
    downlink: DownlinkTable = DownlinkTable()
    server: ServerTable = ServerTable()
    identity: IdentityTable = IdentityTable()
    client: ClientTable = ClientTable()
    limits: Limits = field(default_factory=Limits)
    faults: FaultsTable = field(default_factory=FaultsTable)
    flower: FlowerTable = field(default_factory=FlowerTable)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def to_json(self, every_table: bool = False) -> dict[str, Any]:
        """Tables of plain values, to be stored and shown: secrets are masked. `[strategy]` is flat again.

        Tables and keys that were not always there are left out where they say nothing, unless `every_table`:
        the journal of an unchanged run stays what it was.
        """
        quiet = () if every_table else [t for t in LATER if getattr(self, t) == TABLES[t]()]
        write = _writer().unstructure
        out = {t: write(getattr(self, t)) for t in TABLES if t not in quiet}
        for table, keys in () if every_table else out.items():
            unsaid = _unsaid(table)
            out[table] = {k: v for k, v in keys.items() if k not in unsaid or unsaid[k] != v}
        out["strategy"] = {"name": self.strategy.name, **self.strategy.params}
        return out

    def to_toml(self, every_key: bool = False, clear: bool = False, besides: Collection[str] = ()) -> str:
        """As the text of a file of settings: what is not as it is by default, or `every_key`.

        `besides`: settings, `table.key`, that are there even as they are by default.
        What was said of the strategy is there in any case. Secrets are masked, unless `clear`.
        """
        tables, defaults = self.whole(clear), Config().to_json(every_table=True)
        if not every_key:
            said = {
                t: {k: v for k, v in keys.items() if v != defaults[t].get(k) or f"{t}.{k}" in besides}
                for t, keys in tables.items()
            }
            tables = {**said, "strategy": tables["strategy"]}
        return toml_text(tables)

    def whole(self, clear: bool) -> dict[str, Any]:
        """As `to_json`, with every key; secrets are masked, unless `clear`."""
        tables = self.to_json(every_table=True)
        for path, text in self.secrets().items() if clear else ():
            table, _, key = path.partition(".")
            tables[table][key] = text
        return tables

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_json`, but for secrets; of older releases too.

        Raises `StoreNewer` for what a newer release has written, `ConfigError` for what none has.
        """
        _check_not_newer(data)
        return merge([("before", BEFORE), ("before", UNSAID), ("json", data)])

    def secrets(self) -> dict[str, str]:
        """The clear text of what `to_json` masks, by `table.key`."""
        shown = self.to_json()
        return {
            f"{t}.{f.name}": getattr(getattr(self, t), f.name)
            for t in TABLES
            for f in fields(TABLES[t])
            if f.metadata == SECRET and shown[t][f.name] != getattr(getattr(self, t), f.name)
        }


TABLES: dict[str, type[Any]] = {
    "run": RunTable,
    "fleet": FleetTable,
    "ray": RayTable,
    "strategy": StrategyTable,
    "model": ModelTable,
    "submodel": SubmodelTable,
    "robust": RobustTable,
    "privacy": PrivacyTable,
    "secagg": SecaggTable,
    "uplink": UplinkTable,
    "downlink": DownlinkTable,
    "server": ServerTable,
    "identity": IdentityTable,
    "client": ClientTable,
    "limits": Limits,
    "faults": FaultsTable,
    "flower": FlowerTable,
}
LATER = ("model", "limits", "privacy", "secagg")
# Settings by which runs of releases that did not know them were as these values make them.
BEFORE = {"run": {"rejections_max": 0}}
# And those that are not written either: journals of such runs stay what they were.
UNSAID: dict[str, dict[str, Any]] = {
    "run": {"rules": 0},
    "server": {"lapsed": LOT, "windows": MINUTE},
    "submodel": {"step_time": PROPORTIONAL},
}


def merge(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Config:
    """One configuration of layers (source name, tables), later layers over earlier ones.

    Raises `ConfigError`, naming the key and the nearest known one, or the type or range needed; and
    the source, if it has a name and is not before the eyes of who typed it.
    """
    values: dict[str, dict[str, Any]] = {t: {} for t in TABLES}
    sources: dict[str, str] = {}
    for source, tables in layers:
        for table, keys in tables.items():
            if table not in TABLES and not isinstance(keys, Mapping):
                found = " or ".join(f"[{name}]" for name in _tables_of(table))
                hint = found and f": it is a key of {found}, and goes below that line"
                raise ConfigError(f"{table!r} stands in no table{hint}{said_in(source)}")
            _known(table, TABLES, "table", source)
            if not isinstance(keys, Mapping):
                raise ConfigError(f"[{table}] must be a table of keys, not {keys!r}{said_in(source)}")
            for key, value in keys.items():
                values[table][key] = of_python(value)
                sources[f"{table}.{key}"] = source
    strategy = values.pop("strategy")
    name = strategy.pop("name", StrategyTable.name)
    try:
        built = {t: build(TABLES[t], v, t, sources) for t, v in values.items()}
        built["limits"] = fitted(built["limits"], values["limits"])
        built["strategy"] = StrategyTable(str(name), strategy)
        check_ranges(built)
    except ConfigError as error:  # a value's, which begins with its `table.key`; a name's has its source
        raise ConfigError(f"{error}{said_in(sources.get(str(error).partition(' ')[0], ''))}") from error
    return Config(sources=sources, **built)


def build(cls: type[T], values: Mapping[str, Any], table: str, sources: Mapping[str, str] | None = None) -> T:
    """A dataclass of the table's values. Raises `ConfigError` on unknown keys and wrong types.

    `sources`: who said each, by `table.key`.
    """
    said_by = sources or {}
    known = _keys_of(cls)
    for key in values:
        _known(key, known, f"key in [{table}]", said_by.get(f"{table}.{key}", ""))
    try:
        return from_plain(dict(values), cls, _reader)
    except FieldError as error:
        raise ConfigError(f"{table}.{error}") from error


def _keys_of(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls) if f.metadata != NO_KEY]


def _check_not_newer(stored: Mapping[str, Any]) -> None:
    tables = {table: keys for table, keys in stored.items() if isinstance(keys, Mapping)}
    for table, keys in tables.items():
        if table not in TABLES:
            raise StoreNewer(f"[{table}] is a table of settings that is not known here: {UPGRADE}")
        if table != "strategy":
            for key in keys.keys() - _keys_of(TABLES[table]):
                raise StoreNewer(f"{table}.{key} is a setting that is not known here: {UPGRADE}")
    rules = tables.get("run", {}).get("rules", 0)
    if isinstance(rules, int) and rules > NEWEST:
        raise StoreNewer(f"run.rules is {rules}, and {NEWEST} is the newest known here: {UPGRADE}")


def check_type(value: Any, of: Any, path: str) -> None:
    """Raises `ConfigError` for a value that could not be read as one of this type, naming its `table.key`."""
    try:
        from_plain(of_python(value), of, _reader)
    except FieldError as error:
        raise ConfigError(f"{path} {error}") from error


def parse_override(text: str, option: str = f"{TYPED} ") -> tuple[str, str, Any]:
    """`table.key=value` as (table, key, value); the value is read as TOML, or else as a string.

    Raises `ConfigError`, which shows how to write it after `option`.
    """
    import tomllib

    path, equals, raw = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        value = raw.strip() or "1"
        found = [f"{name}.{path.strip()}={value}" for name in _tables_of(path.strip())]
        example = f" or {option}".join(found) or "run.updates_max=1"
        raise ConfigError(f"{option}{text!r}: write table.key=value, for example {option}{example}")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return table, key, value


def _tables_of(key: str) -> list[str]:
    """Those that have such a key."""
    return [name for name, table in TABLES.items() if key in {field.name for field in fields(table)}]


def _known(name: str, known: Iterable[str], what: str, source: str = "") -> None:
    names = list(known)
    if name in names:
        return
    hint = did_you_mean(name, names, likeness=0.4) or (
        f"known: {', '.join(names)}" if names else "there are none"
    )
    raise ConfigError(f"unknown {what}: {name!r}; {hint}{said_in(source)}")


def said_in(source: str) -> str:
    """Where a value was said, for the end of a clause; nothing of what was just typed."""
    return f" ({source})" if source and source != TYPED else ""


_as_given = make_converter(finite)
_reader = make_converter(real)
# Whole numbers in lists stay: journals have them as they were given.
_reader.register_structure_hook_func(lambda of: of == list[float], _as_given.structure)


@cache
def _unsaid(table: str) -> dict[str, Any]:
    """The keys that were not always there, with what they say where nobody has said anything."""
    cls = TABLES[table]
    later = {f.name for f in fields(cls) if f.metadata == LATER_KEY}
    defaults = _writer().unstructure(cls())
    return {k: v for k, v in defaults.items() if k in later} | UNSAID.get(table, {})


@cache
def _writer() -> Converter:
    """Writes tables with every key, secrets masked. To make one is a good part of a server's start."""
    made = make_converter()
    for cls in TABLES.values():
        secrets = [f.name for f in fields(cls) if f.metadata == SECRET]
        hidden: dict[str, Any] = {name: override(unstruct_hook=masked) for name in secrets}
        written(made, cls, **hidden)
    return made
