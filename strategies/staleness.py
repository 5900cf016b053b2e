"""Staleness functions S: how much an old update still counts.

| symbol | name        | meaning                                                    |
|--------|-------------|------------------------------------------------------------|
| tau    | staleness   | version before the update is applied - base version (>= 0) |
| a      | a           | exponent (polynomial) or slope (hinge)                     |
| b      | b           | the last staleness that costs nothing (hinge)              |

    constant    S(tau) = 1
    polynomial  S(tau) = (tau + 1)^(-a)
    hinge       S(tau) = 1 if tau <= b, else 1 / (a (tau - b) + 1)

Source: Xie, Koyejo and Gupta, "Asynchronous federated optimization", arXiv 1903.03934, section 5.2, as public
implementations have it, whose a and b are the defaults. There a fresh update has staleness 1 (recalled); here
it has 0, so S(0) = 1 in every function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anabranch.core.config.tables import build
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, is_data


class StalenessFunction(Protocol):
    """A function of tau with S(0) = 1 that never grows."""

    def __call__(self, tau: float) -> float:
        """The weight of an update of staleness `tau`."""
        ...


@dataclass(frozen=True)
class Constant:
    """Age does not matter."""

    def __call__(self, tau: float) -> float:
        """S(tau) = 1."""
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """S(tau) = (tau + 1)^(-a)."""

    a: float = 0.5

    def __call__(self, tau: float) -> float:
        """The weight at `tau`."""
        return float((tau + 1.0) ** -self.a)


@dataclass(frozen=True)
class Hinge:
    """S(tau) = 1 up to b, then 1 / (a (tau - b) + 1)."""

    a: float = 10.0
    b: float = 4.0

    def __call__(self, tau: float) -> float:
        """The weight at `tau`."""
        return 1.0 if tau <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)


FUNCTIONS: dict[str, type[Constant] | type[Polynomial] | type[Hinge]] = {
    "constant": Constant,
    "polynomial": Polynomial,
    "hinge": Hinge,
}


LOOKED_AT = 3  # values: one that has a table of them may know no more


def _check(found: Any) -> None:
    if not (is_data(found) and "__call__" in vars(found)):
        raise ConfigError(
            "a staleness function is a dataclass of its parameters with __call__(self, tau): write "
            "@dataclass(frozen=True)"
        )


NAMED_IN = ("strategy.staleness.name", "strategy.phases.staleness.name")
STALENESS = PartKind("staleness function", "staleness", NAMED_IN, FUNCTIONS, (), _check)


def make_staleness(params: Mapping[str, Any]) -> StalenessFunction:
    """The function of a table such as `{name = "polynomial", a = 0.5}`. Raises `ConfigError`."""
    values = dict(params)
    function: StalenessFunction = build(
        STALENESS.find(str(values.pop("name", ""))), values, "strategy.staleness"
    )
    for key, value in vars(function).items():
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"strategy.staleness.{key} must not be negative, not {value!r}")
    if type(function) not in FUNCTIONS.values():
        _check_falls(function)
    return function


def _check_falls(function: StalenessFunction) -> None:
    """One of one's own keeps to what strategies count on, as far as a look at its first values tells."""
    before = 1.0
    for tau in range(LOOKED_AT):
        try:
            weight = function(tau)
        except Exception:  # noqa: BLE001 - it raises again where it is wanted, and is told there
            return
        if not (weight == 1 if tau == 0 else 0 <= weight <= before):
            wanted = f"from 0 to {before!r}, as it must not grow" if tau else "1"
            raise ConfigError(
                f"strategy.staleness: {type(function).__name__} is {weight!r} at a staleness of {tau}: it "
                f"has to be {wanted}"
            )
        before = weight
