"""An audit of what is promised: whether a device's values were there is guessed as well as it can be.

Every promise is tried on many runs with a device's values and many with zeros in their place. How often the
best guess is right bounds epsilon from below, whatever the accountant says; what is done worse than it is
written must come out above the promise. All keys are fixed, so it comes out alike every time.

| symbol | meaning                                                                                 |
|--------|-----------------------------------------------------------------------------------------|
| x      | (T,) what the device adds to each of T sums, in clips: 1 where it takes part            |
| C      | (T, T) of the correlated noise: C times it is independent, of deviation z               |
| y      | what is published: x and noise. <C x, C y> / |C x| tells all that y does of x           |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from private_bench import KEY, private_config

from anabranch.core import events as ev
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.effects import Decided
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Ask, Capability, Update, Verdict
from anabranch.core.privacy.mechanism import Mechanism, PrivateSums
from anabranch.core.secagg.ring import add_weighted
from anabranch.core.secagg.sums import mask_sum
from anabranch.core.secagg.terms import Terms
from anabranch.host.build import Blueprint

RUNS = 100_000
CHANCE = 1e-3  # of a bound that does not hold
DELTA = 0.01


def promised(table: PrivacyTable) -> float:
    """Of a run that goes on for ever."""
    promise = table.promise(10**6)
    assert promise is not None
    return promise.epsilon


# --- what guesses show -----------------------------------------------------------------------------------


def at_most(hits: NDArray[np.integer], runs: int) -> Vector:
    """What comes so often has no larger probability, but by `CHANCE`: Chernoff's bound, solved for it."""
    share = np.asarray(hits / runs)
    low, high = share, np.ones_like(share)
    for _ in range(60):
        middle = (low + high) / 2
        near = -math.log(CHANCE) > runs * (_nats(share, middle) + _nats(1 - share, 1 - middle))
        low, high = np.where(near, middle, low), np.where(near, high, middle)
    return high


def _nats(p: Vector, q: Vector) -> Vector:
    """What one side of a coin of p adds to its divergence from one of q."""
    return p * np.log(np.divide(p, q, out=np.ones_like(p), where=p > 0))


def shown(inside: Vector, outside: Vector) -> float:
    """An epsilon that is surely there: the threshold is chosen on one half, and tried on the other."""
    thresholds = np.quantile(outside, np.linspace(0.5, 0.9999, 400))
    best = thresholds[np.argmax(_bounds(inside[::2], outside[::2], thresholds))]
    return float(_bounds(inside[1::2], outside[1::2], best))


def _bounds(inside: Vector, outside: Vector, at: Vector) -> Vector:
    """P(inside > at) <= e^epsilon P(outside > at) + delta holds for what is promised: solved for epsilon."""
    under, over = (np.searchsorted(np.sort(values), at, side="right") for values in (inside, outside))
    least = 1.0 - at_most(under, inside.size)
    most = at_most(outside.size - over, outside.size)
    return np.log(np.where(least > DELTA, (least - DELTA) / most, 1.0))


def test_the_audit_shows_what_is_there() -> None:
    """Of normals one deviation apart epsilon is 2.318, by the curve at this delta: nearly that, not more."""
    rng = np.random.default_rng(1)
    assert 1.8 < shown(rng.normal(1.0, 1.0, RUNS), rng.normal(size=RUNS)) < 2.318
    assert shown(rng.normal(size=RUNS), rng.normal(size=RUNS)) <= 0.0
    assert at_most(np.array(0), 1000) == pytest.approx(1 - CHANCE ** (1 / 1000), rel=1e-6)


# --- the sums of a run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """What is done: the mechanism, how strong an update counts, and at which sums the device takes part."""

    mechanism: Mechanism
    weight: float
    times: tuple[int, ...]

    @classmethod
    def of(cls, table: PrivacyTable) -> Sums:
        """As it is written."""
        promise = table.promise(1)
        assert promise is not None
        times = tuple(table.separation * i for i in range(table.participations))
        return cls(Mechanism(table.clip, promise.noise, promise.bands), 1.0, times)

    def shown(self) -> float:
        """By `RUNS` runs each way: every coordinate of the noise is a run of its own."""
        bands, clip = self.mechanism.bands, self.mechanism.clip
        part = self.weight * self.mechanism.part(np.array([1e6]), 1.0, 1)[0]
        x = np.zeros(self.times[-1] + bands)
        x[list(self.times)] = part / clip
        c = root(x.size, bands)
        guess = c.T @ (c @ x) / np.linalg.norm(c @ x)
        found = []
        for at, key in enumerate((KEY, bytes(32))):
            sums, told = PrivateSums(self.mechanism, RUNS, key), np.zeros(RUNS)
            for t in range(x.size):
                told += guess[t] * sums.noised(np.full(RUNS, 0.0 if at else x[t] * clip), t + 1)
                sums.published(t + 1)
            found.append(told)
        return shown(*found)


def root(size: int, bands: int) -> Vector:
    """The square root of the matrix of prefix sums, by binomials, cut to its bands: (size, size)."""
    column = [math.comb(2 * j, j) / 4**j if j < bands else 0.0 for j in range(size)]
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(size)] for i in range(size)])


INDEPENDENT = PrivacyTable(clip=0.5, epsilon=2.0, delta=DELTA, participations=4, bands=1)
CORRELATED = replace(INDEPENDENT, separation=4, bands=4)
TABLES = {
    "one update": replace(INDEPENDENT, participations=1),
    "four updates": INDEPENDENT,
    "correlated": CORRELATED,
    "three bands of five": replace(INDEPENDENT, separation=5, bands=3),
    "little noise": replace(CORRELATED, epsilon=3.0),
}


@pytest.mark.parametrize("name", TABLES)
def test_no_guess_shows_more_than_is_promised_and_the_best_nearly_as_much(name: str) -> None:
    table = TABLES[name]
    found = Sums.of(table).shown()
    assert 0.75 * promised(table) < found <= promised(table)


WRITTEN, BANDED = Sums.of(INDEPENDENT), Sums.of(CORRELATED)
ONE = Sums.of(TABLES["one update"])
WORSE: dict[str, tuple[PrivacyTable, Sums]] = {
    "half the noise": (
        CORRELATED,
        replace(BANDED, mechanism=replace(BANDED.mechanism, noise=BANDED.mechanism.noise / 2)),
    ),
    "twice the clip, or twice the weight": (CORRELATED, replace(BANDED, weight=2.0)),
    "noise as for one update": (INDEPENDENT, replace(WRITTEN, mechanism=ONE.mechanism)),
    "more updates than may be": (INDEPENDENT, replace(WRITTEN, times=tuple(range(16)))),
    "correlated noise of as little as independent": (
        CORRELATED,
        replace(BANDED, mechanism=replace(WRITTEN.mechanism, bands=CORRELATED.bands)),
    ),
    "no separation": (CORRELATED, replace(BANDED, times=(0, 1, 2, 3))),
}


@pytest.mark.parametrize("name", WORSE)
def test_what_is_done_worse_shows_more_than_is_promised(name: str) -> None:
    table, worse = WORSE[name]
    assert worse.shown() > promised(table)


# --- the model of a run ----------------------------------------------------------------------------------


def canaries(noise: float, devices: int, size: int, turns: int = 2) -> tuple[Vector, Vector]:
    """The values of a final model that a device each has pushed as far as it could, and those of nobody.

    A real engine, one run: what one coordinate shows of its device no other one changes.
    """
    spec = ParamSpec.of({"w": np.zeros(size, np.float32)})
    privacy = {"clip": 2.0, "noise": noise, "participations": turns, "bands": 1, "delta": DELTA}
    strategy = {"name": "fedbuff", "buffer_size": devices}
    config = private_config(strategy, privacy, fleet={"clients": devices})
    engine = Blueprint.of(config, spec, key=KEY).engine({"w": np.zeros(size, np.float32)})
    for device in range(devices):
        engine.handle(ev.Enrolled(0.0, f"d{device}", Capability()))
    for turn in range(turns):
        for device in range(devices):
            task, delta = f"t{turn}-{device}", np.zeros(size, np.float32)
            delta[device] = 1e6
            engine.handle(ev.TaskAsked(float(turn), Ask(f"d{device}", task)))
            update = Update(f"u-{task}", task, f"d{device}", turn, 1, delta)
            effects = engine.handle(ev.UpdateArrived(turn + 0.5, update, ev.Payload("00" * 32, 4 * size)))
            (decided,) = (e for e in effects if isinstance(e, Decided))
            assert decided.receipt.decision.verdict is not Verdict.REJECTED
    assert engine.version == turns
    model: Any = engine.vector
    return model[:devices].astype(np.float64), model[devices:].astype(np.float64)


NOISE = 1.5  # in clips


def canary_epsilon() -> float:
    return promised(PrivacyTable(clip=2.0, noise=NOISE, delta=DELTA, participations=2, bands=1))


def test_the_model_of_a_run_shows_its_devices_no_more_than_is_promised() -> None:
    promise = canary_epsilon()
    found = shown(*canaries(NOISE, 300, 10_000))
    assert 0.4 * promise < found <= promise
    assert shown(*canaries(NOISE / 2, 300, 10_000)) > promise, "300 devices are enough to see it"


@pytest.mark.prove
def test_more_devices_show_no_more_either() -> None:
    promise = canary_epsilon()
    found = shown(*canaries(NOISE, 4000, 100_000))
    assert 0.5 * promise < found <= promise
    assert shown(*canaries(NOISE / 2, 4000, 100_000)) > promise


# --- sums under masks ------------------------------------------------------------------------------------


def under_masks(terms: Terms, weight: int) -> tuple[Vector, Vector]:
    """What a server gets of a device's value in a sum, and without it. Every value has noise of its own."""
    found, sums = [], RUNS // terms.size
    for integer in (terms.ring.top, 0):
        seen = []
        for number in range(sums):
            seed = (2 * number + (integer > 0)).to_bytes(32, "big")
            total = terms.ring.empty()
            add_weighted(total, terms.ring.masked(np.full(terms.size, integer), [seed]), weight)
            masks = mask_sum(terms, [(seed, weight)], bytes([7]) + seed[1:])
            seen.append(terms.ring.unmasked(total, [masks]))
        found.append(np.concatenate(seen).astype(np.float64))
    return found[0], found[1]


def test_a_keepers_noise_hides_a_device_as_promised_and_less_does_not() -> None:
    table = PrivacyTable(clip=1.0, noise=1.25, delta=DELTA, bands=1)
    terms = Terms(32, 14, 1.0, 250, (16, 11, 9), 20, 8, ("ab" * 32,), 1.25, 1, 1)
    promise = promised(table)
    assert 0.75 * promise < shown(*under_masks(terms, 16)) <= promise
    assert shown(*under_masks(replace(terms, noise=0.625), 16)) > promise, "half the noise"
    assert shown(*under_masks(replace(terms, weights=(8,)), 16)) > promise, "of half the weight"
