"""The parts of examples/extending: where they are, and how a package would bring them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from anabranch.client.transports import TRANSPORTS
from anabranch.compress.registry import CODEC_STAGES, make_codec
from anabranch.core import parts
from anabranch.core.parts import PartKind
from anabranch.reports.trackers import TRACKERS
from anabranch.server.store.factory import STORES
from anabranch.simulation.attacks import ATTACKS
from anabranch.simulation.executors.names import EXECUTORS
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.robust.registry import RULES
from anabranch.strategies.schedulers.registry import SCHEDULERS
from anabranch.strategies.staleness import STALENESS
from anabranch.strategies.submodels.registry import PLANNERS
from anabranch.support.code import let_in_one, load
from anabranch.workloads.registry import APPS
from anabranch.workloads.splits import SPLITS

FOLDER = Path(__file__).parents[2] / "examples" / "extending"


@dataclass(frozen=True)
class Own:
    """A part of one's own: its kind, its file, and what it is called there and everywhere."""

    kind: PartKind
    file: str
    cls: str
    name: str

    @property
    def place(self) -> str:
        """How a setting names it."""
        return f"{FOLDER / self.file}:{self.cls}"

    @property
    def part(self) -> Any:
        """The part, loaded by its path, and let in nowhere."""
        return _loaded(self.place)

    def let_in(self) -> Any:
        """The part, from now on known to this process: in tests inside `forgotten`."""
        let_in_one(self.kind, self.place)
        return self.kind.find(self.place)


@cache
def _loaded(place: str) -> Any:
    return load(place)


STRATEGY = Own(STRATEGIES, "strategy.py", "WarmUp", "warm_up")
COMPOSITION = Own(STRATEGIES, "composition.py", "NesterovBuffer", "nesterov_buffer")
STAGE = Own(CODEC_STAGES, "stage.py", "Signs", "signs")
TRACKER = Own(TRACKERS, "tracker.py", "Csv", "csv")
RULE = Own(RULES, "rule.py", "NormBound", "norm_bound")
PLANNER = Own(PLANNERS, "planner.py", "OddEven", "odd_even")
HALF_LIFE = Own(STALENESS, "staleness.py", "HalfLife", "half_life")
SCHEDULER = Own(SCHEDULERS, "scheduler.py", "Resting", "resting")
SPLIT = Own(SPLITS, "split.py", "steps", "steps")
ATTACK = Own(ATTACKS, "attack.py", "Backwards", "backwards")
EXECUTOR = Own(EXECUTORS, "executor.py", "Counting", "counting")
STORE = Own(STORES, "store.py", "Elsewhere", "elsewhere")
TRANSPORT = Own(TRANSPORTS, "transport.py", "FromFile", "file")
APP = Own(APPS, "app.py", "Line", "Line")
ALL = (
    *(STRATEGY, STAGE, TRACKER, RULE, PLANNER, HALF_LIFE, SCHEDULER),
    *(SPLIT, ATTACK, EXECUTOR, STORE, TRANSPORT, APP),
)


@contextmanager
def forgotten() -> Iterator[None]:
    """What is let in inside is known no more afterwards: a device of another test would speak of it."""
    kept = [(own.kind, dict(own.kind._let_in)) for own in ALL]
    names = dict(parts._OWN_NAMES)
    try:
        yield
    finally:
        for kind, known in kept:
            kind._let_in.clear()
            kind._let_in.update(known)
        parts._OWN_NAMES.clear()
        parts._OWN_NAMES.update(names)
        make_codec.cache_clear()  # it has codecs of stages that are known no more


def install(folder: Path, *own: Own) -> Path:
    """What `pip install` would put into a folder of the import path: modules, and their entry points."""
    package, about = folder / "own_parts_package", folder / "own_parts-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    groups: dict[str, list[str]] = {}
    for part in own:
        shutil.copy(FOLDER / part.file, package / part.file)
        where = f"own_parts_package.{Path(part.file).stem}:{part.cls}"
        groups.setdefault(part.kind.group, []).append(f"{part.name} = {where}")
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *entries)]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n", encoding="utf-8"
    )
    return folder
