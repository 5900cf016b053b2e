"""The tables of `strategy.phases`: what is not the strategy's own in one, and what they may not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from anabranch.core.config.tables import build
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.strategies.parameters import NOT_NEGATIVE, Range, check_parameters

Table = Mapping[str, Any]


@dataclass(frozen=True)
class PhaseTraining:
    """Keys of `[client]` that the tasks of a phase have instead; None: as there."""

    learning_rate: Annotated[
        float | None, Range("be greater than 0", lambda rate: rate is None or rate > 0)
    ] = None
    momentum: Annotated[float | None, Range("not be negative", lambda x: x is None or x >= 0)] = None


@dataclass(frozen=True)
class PhaseTerms:
    """When a phase ends, counted from the run's beginning, and what is special to it meanwhile.

    `until_updates`: a whole number, or a fraction of `run.updates_max`. `exclude_slowest`: that part of the
    fleet has no part in its rounds.
    """

    until_updates: Annotated[
        float,
        Range(
            "be a whole number, or a fraction of run.updates_max that is less than 1",
            lambda x: x >= 0 and (x < 1 or x == int(x)),
        ),
    ] = 0.0
    until_versions: Annotated[int, NOT_NEGATIVE] = 0
    exclude_slowest: Annotated[float, Range("be in [0, 0.5)", lambda x: 0 <= x < 0.5)] = 0.0
    client: PhaseTraining = PhaseTraining()


OWN = ("strategy", *(f.name for f in fields(PhaseTerms)))


@dataclass(frozen=True)
class PhaseTable:
    """One table, taken apart: the strategy's name and parameters, and the rest. `place` is for messages."""

    place: str
    name: str
    params: Table
    phase: PhaseTerms = field(default_factory=PhaseTerms)

    @classmethod
    def of(cls, number: int, table: Any) -> PhaseTable:
        """Of the table with this number. Raises `ConfigError`."""
        place = f"strategy.phases[{number}]"
        name = table.get("strategy") if isinstance(table, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(f"{place}.strategy must name a strategy, not {name!r}")
        phase = build(PhaseTerms, {key: table[key] for key in OWN[1:] if key in table}, place)
        check_parameters(phase, place)
        check_parameters(phase.client, f"{place}.client")
        return cls(place, name, {key: value for key, value in table.items() if key not in OWN}, phase)


def check_phases(tables: Sequence[PhaseTable], parts: Sequence[Strategy]) -> None:
    """Whether these may follow each other. Raises `ConfigError`, naming the table."""
    *ending, last = tables
    if last.phase.until_updates or last.phase.until_versions:
        raise ConfigError(
            f"{last.place} goes on to the end of the run, as it is the last: leave its until out"
        )
    if last.phase.exclude_slowest:
        raise ConfigError(
            f"{last.place}.exclude_slowest: no phase follows in which those devices would train: leave it out"
        )
    for table in ending:
        if bool(table.phase.until_updates) == bool(table.phase.until_versions):
            raise ConfigError(f"{table.place} needs one of until_updates and until_versions: when it is over")
    _check_order([table.phase.until_versions for table in ending])
    _check_order([u for table in ending if (u := table.phase.until_updates) < 1])
    _check_order([u for table in ending if (u := table.phase.until_updates) >= 1])
    for table, part in zip(tables, parts, strict=True):
        if table.phase.exclude_slowest and not part.synchronous:
            raise ConfigError(f"{table.place}.exclude_slowest is for rounds, and {part.name!r} has none")


def _check_order(ends: Sequence[float]) -> None:
    known = [end for end in ends if end]
    if known != sorted(set(known)):
        raise ConfigError(
            "strategy.phases: until_updates and until_versions count from the run's beginning, so each must "
            f"be more than the one before, not {', '.join(f'{end:g}' for end in known)}"
        )
