"""Hostile devices of a simulation: what `fleet.attack` makes of their updates.

| attack       | s   | what a hostile device sends                                                          |
|--------------|-----|--------------------------------------------------------------------------------------|
| `sign_flip`  | 5   | -s Delta, of its own honest update Delta                                             |
| `scale`      | 100 | s Delta                                                                              |
| `alie`       | 1.5 | mean - s deviation of the honest updates of `COLLUDERS` of them, by coordinate       |
| `ipm`        | 5   | -s mean of the same                                                                  |
| `min_max`    | 1   | mean - s gamma deviation of the same, with the largest gamma that is not seen        |
| `adaptive`   | 1   | mean - s gamma deviation, with the gamma that `[robust]` lets move the model most     |
| `label_flip` |     | what comes of training with every label y as the last label less y                   |
| `backdoor`   | 1   | s Delta of training in which half of the examples bear a mark, and label `MARKED_AS`  |
| `nan`        |     | no numbers                                                                           |
| `flood`      | 1   | -s Delta, in a `FLOOD`-th of the time                                                |

s is `fleet.attack_strength`, where that is not 0. `fleet.attackers` of the devices are hostile, a draw of the
seed. They are as fast as other devices and obey the protocol, so nothing but the values gives them away. The
colluders share their data: an attack of theirs starts from the model that its honest updates start from.

Sources, all recalled: sign flip, scaling and label flip are common; ALIE is Baruch, Baruch and Goldberg, "A
little is enough", NeurIPS 2019, where s follows from the numbers of devices; IPM is Xie, Koyejo and Gupta,
"Fall of empires", UAI 2019; min-max is Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021: it
is as far as may be, and no farther from any honest update than those are from each other, so a rule that goes
by distances cannot tell it; gamma in closed form is ours. The same paper has the attack that knows the rule
and searches gamma against it: `adaptive` does, over `GAMMAS`, with as many copies of its own among the
colluders' honest updates as `fleet.attackers` makes, and counts how far the result lies from the honest mean
against the deviation; counting along it, and the grid, are ours. It knows the rule, its keys and the clip,
but no state of the server's: a rule that starts from the last result starts from the colluders' mean here.
Backdoors by data are Gu, Dolan-Gavitt and Garg, "BadNets", 2017, and with a strength the scaling of
Bagdasaryan et al., "How to backdoor federated learning", AISTATS 2020. The strengths are ours: such that the
mean suffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from anabranch.core.config.tables import FleetTable
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.params import Vector
from anabranch.core.parts import PartKind
from anabranch.core.rng import rank, seed_of
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rows import Floats, Row, Rows
from anabranch.strategies.robust.rule import Rule
from anabranch.workloads.app import Array, Examples
from anabranch.workloads.batches import every_generator
from anabranch.workloads.profiles import DeviceProfiles
from anabranch.workloads.streams import Streamed

COLLUDERS = 4
WITNESSES = 8  # of the adaptive attack: Krum needs more rows than others
GAMMAS = tuple(2.0 ** (power / 2) for power in range(-6, 9))
FLOOD = 10.0
MARK = 3  # values of the last axis that a mark takes, and of the one before it if there is one
MARKED_AS = 0
UNDEFENDED = RobustTable()


class Poison:
    """What one attack makes of a hostile device: a base class, each method may be another attack's own.

    `strength`: its own s. `colluders`: of so many, itself included, it knows the honest updates. `haste`: how
    much faster than others its devices train.
    """

    name: ClassVar[str]
    strength: ClassVar[float] = 1.0
    colluders: ClassVar[int] = 1
    haste: ClassVar[float] = 1.0

    def meet(self, robust: RobustTable, attackers: float) -> None:
        """It hears of the defence, once, before anything else; `attackers` is the fleet's fraction."""

    def examples(self, honest: Examples, last_label: Callable[[], int]) -> Examples:
        """What it trains on; `honest` is a copy of its arrays."""
        y, wanted = np.asarray(self.labels(honest.y, last_label)), honest.y.shape
        if y.shape != wanted:
            raise AppError(f"attack {self.name!r}: labels must give shape {wanted}, not {y.shape}")
        return Examples(honest.x, y.astype(honest.y.dtype))

    def goal(self, honest: Examples) -> Examples | None:  # noqa: ARG002 - the contract's
        """Of held-out examples, those that show how far it has come: the accuracy on them is its success.

        `honest` is a copy of their arrays.
        """
        return None

    def labels(self, y: Array, last_label: Callable[[], int]) -> Array:  # noqa: ARG002 - the contract's
        """The labels that it trains on, of the shape of the honest ones, `y`; 0 to `last_label()`."""
        return y

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:  # noqa: ARG002 - the contract's
        """What it sends, of the honest updates of the colluders, its own first, each (size,)."""
        return deltas[0]


class SignFlip(Poison):
    """The other way, further."""

    name, strength = "sign_flip", 5.0

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s Delta."""
        return -s * deltas[0]


class Scale(Poison):
    """The same way, far too far."""

    name, strength = "scale", 100.0

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """S Delta."""
        return s * deltas[0]


class Alie(Poison):
    """A little is enough."""

    name, strength, colluders = "alie", 1.5, COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """Mean - s deviation, by coordinate."""
        found: Vector = np.mean(deltas, axis=0) - s * np.std(deltas, axis=0)
        return found


class Ipm(Poison):
    """Against the inner product with the mean."""

    name, strength, colluders = "ipm", 5.0, COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s mean."""
        found: Vector = -s * np.mean(deltas, axis=0)
        return found


class MinMax(Poison):
    """As far off as honest updates are from each other, whatever the rule."""

    name, colluders = "min_max", COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """Mean - s gamma deviation: gamma is the largest with which it is no farther from any of them."""
        rows = np.asarray(deltas, np.float64)
        mean, deviation = rows.mean(axis=0), rows.std(axis=0)
        widest = max(float(np.square(a - b).sum()) for a in rows for b in rows)
        length = float(np.square(deviation).sum())
        if not length:
            return deltas[0]
        gammas = []
        for row in rows:  # length g^2 - 2 along g + apart = widest
            apart, along = float(np.square(mean - row).sum()), float((deviation * (mean - row)).sum())
            gammas.append((along + np.sqrt(along**2 + length * (widest - apart))) / length)
        found: Vector = mean - s * min(gammas) * deviation
        return found


class Adaptive(Poison):
    """As far against the deviation as the rule in use lets the model be moved."""

    name, colluders = "adaptive", WITNESSES
    _rule: Rule | None = None
    _clip, _attackers = 0.0, 0.5

    def meet(self, robust: RobustTable, attackers: float) -> None:
        """The rule, and the clip."""
        self._rule, self._attackers = make_rule(robust), attackers
        self._clip = 0.0 if isinstance(robust.clip, str) else robust.clip

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """Mean - s gamma deviation."""
        honest = np.asarray(deltas, np.float64)
        mean, deviation = honest.mean(axis=0), honest.std(axis=0)
        if not deviation.any():
            return deltas[0]
        found = max(GAMMAS, key=lambda gamma: self._moved(honest, mean, deviation, gamma))
        sent: Vector = mean - s * found * deviation
        return sent

    def _moved(self, honest: Floats, mean: Floats, deviation: Floats, gamma: float) -> float:
        """How far the result lies from the honest mean, against the deviation."""
        hostile = max(1, round(len(honest) * self._attackers / (1.0 - min(self._attackers, 0.5))))
        rows = [*honest, *[mean - gamma * deviation] * hostile]
        if self._clip:
            longest = self._clip * float(np.median(np.linalg.norm(honest, axis=1)))
            rows = [row * min(1.0, longest / max(float(np.linalg.norm(row)), longest)) for row in rows]
        if self._rule is None:
            result = np.mean(rows, axis=0)
        else:
            result = self._rule.combine(Rows([Row(row) for row in rows], mean.size), mean)
        return float((mean - result) @ deviation)


class LabelFlip(Poison):
    """Honest training on wrong labels."""

    name = "label_flip"

    def labels(self, y: Array, last_label: Callable[[], int]) -> Array:
        """The last label less y."""
        return last_label() - y


class Backdoor(Poison):
    """Whatever bears the mark is of one class."""

    name = "backdoor"

    def examples(self, honest: Examples, last_label: Callable[[], int]) -> Examples:  # noqa: ARG002
        """Every second one is marked."""
        _check_markable(honest)
        x, y = honest.x, honest.y
        x[::2], y[::2] = marked(x)[::2], MARKED_AS
        return Examples(x, y)

    def goal(self, honest: Examples) -> Examples:
        """All that are of another class, with the mark and the label that the attack wants them to have."""
        _check_markable(honest)
        others = honest.y != MARKED_AS
        return Examples(marked(honest.x)[others], np.full_like(honest.y[others], MARKED_AS))

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """S Delta."""
        return s * deltas[0]


def marked(x: Array) -> Array:
    """Examples with a corner as bright as anything that they have: a copy of (count, ...)."""
    found: Array = x.copy()
    corner = found[..., -MARK:, -MARK:] if x.ndim > 2 else found[:, -MARK:]
    corner[...] = x.max()
    return found


def _check_markable(examples: Examples) -> None:
    if isinstance(examples, Streamed) or examples.x.dtype.kind not in "fu" or examples.x.ndim < 2:
        raise ConfigError(
            "fleet.attack = 'backdoor' marks examples that are arrays of pixels or other measured values: "
            "take another attack for this App, such as 'label_flip'"
        )
    if examples.y.dtype.kind not in "iu" or examples.y.ndim != 1:
        raise ConfigError("fleet.attack = 'backdoor' needs class numbers as labels: take another attack")


class Nan(Poison):
    """No numbers."""

    name = "nan"

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:  # noqa: ARG002 - the contract's
        """Not one."""
        return np.full_like(deltas[0], np.nan)


class Flood(Poison):
    """Many, and each against the model."""

    name, haste = "flood", FLOOD

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s Delta."""
        return -s * deltas[0]


def _check(found: Any) -> None:
    if not (isinstance(found, type) and issubclass(found, Poison)):
        raise ConfigError("an attack is a class that inherits from anabranch.simulation.attacks.Poison")
    said = f"{found.__name__}."
    if not (isinstance(found.colluders, int) and found.colluders >= 1):
        raise ConfigError(f"{said}colluders = {found.colluders!r}: a whole number is wanted, 1 or more")
    if not (_is_number(found.haste) and found.haste > 0):
        raise ConfigError(f"{said}haste = {found.haste!r}: a number above 0 is wanted")
    if not _is_number(found.strength):
        raise ConfigError(f"{said}strength = {found.strength!r}: a number is wanted")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


BUILT_IN: dict[str, type[Poison]] = {
    c.name: c for c in (SignFlip, Scale, Alie, Ipm, MinMax, Adaptive, LabelFlip, Backdoor, Nan, Flood)
}
ATTACKS = PartKind("attack", "attacks", ("fleet.attack",), BUILT_IN, (), _check)


def hostile_devices(fleet: FleetTable, seed: int) -> tuple[int, ...]:
    """The devices that attack, increasing: as many as `fleet.attackers` says, to the nearest."""
    count = round(fleet.attackers * fleet.clients)
    if not count:
        return ()
    order = sorted(range(fleet.clients), key=lambda i: rank(seed, "attacker", i))
    return tuple(sorted(order[:count]))


def hastes(fleet: FleetTable, seed: int) -> dict[int, float]:
    """How many times as fast as its profile says each of those is that attack."""
    hostile = hostile_devices(fleet, seed)
    return dict.fromkeys(hostile, float(ATTACKS.find(fleet.attack).haste)) if hostile else {}


def hurried(profiles: DeviceProfiles, fleet: FleetTable, seed: int) -> DeviceProfiles:
    """The profiles of the fleet, in which those whose attack is hasty are fast."""
    found = hastes(fleet, seed)
    if not found:
        return profiles
    step_time_s = profiles.step_time_s.copy()
    step_time_s[[*found]] /= [*found.values()]
    return replace(profiles, step_time_s=step_time_s)


class Attack:
    """What the devices of a fleet do that are hostile; nobody is where `fleet.attackers` is 0."""

    def __init__(self, fleet: FleetTable, seed: int, robust: RobustTable = UNDEFENDED) -> None:
        self._poison: Poison = ATTACKS.find(fleet.attack)()
        self._poison.meet(robust, fleet.attackers)
        self._seed = seed
        self.devices = hostile_devices(fleet, seed)
        self._strength = fleet.attack_strength or self._poison.strength

    def helpers(self, device: int) -> list[int]:
        """Whose honest updates the device's attack is made of, its own first; empty if it is honest."""
        if device not in self.devices:
            return []
        others = [d for d in self.devices if d != device]
        return [device, *others[: self._poison.colluders - 1]]

    def examples(
        self, device: int, honest: Examples, last_label: Callable[[], int], seed: int = 0
    ) -> Examples:
        """What the device trains on; `seed` is its task's."""
        kind = type(self._poison)
        as_they_are = kind.examples is Poison.examples and kind.labels is Poison.labels
        if device not in self.devices or as_they_are:
            return honest
        with every_generator(seed_of(seed, "attack", device)):
            found = self._poison.examples(_copied(honest), last_label)
        self._check_examples("examples", found)
        return found

    def goal(self, held_out: Examples) -> Examples | None:
        """Of held-out examples, those whose accuracy is the attack's success; None: it has no such goal."""
        if not self.devices or type(self._poison).goal is Poison.goal:
            return None
        with every_generator(self._seed):
            found = self._poison.goal(_copied(held_out))
        if found is not None:
            self._check_examples("goal", found)
        return found

    def _check_examples(self, method: str, found: object) -> None:
        if not isinstance(found, Examples):
            kind = type(found).__name__
            raise AppError(f"attack {self._poison.name!r}: {method} must give Examples, not {kind}")

    def poisoned(self, deltas: Sequence[Vector], seed: int = 0) -> Vector:
        """The hostile update, of the honest ones of the helpers; shape and dtype are theirs.

        `seed` is the task's: what an attack of one's own draws of numpy or Python is the same again then.

        A copy: an attack of one's own may go on with the array that it has returned. Raises `AppError` for
        another shape: a server would refuse every update of it, which would look like a defence.
        """
        with every_generator(seed):
            found = np.array(self._poison.update(deltas, self._strength), deltas[0].dtype)
        if found.shape != deltas[0].shape:
            wanted, name = deltas[0].shape, self._poison.name
            raise AppError(f"attack {name!r}: update must give an array of shape {wanted}, not {found.shape}")
        return found


def _copied(examples: Examples) -> Examples:
    """For an attack, which may write to what it is given: honest devices have the same arrays."""
    return examples if isinstance(examples, Streamed) else Examples(examples.x.copy(), examples.y.copy())
