"""The accountant against integrals of the densities, every pattern of a short run, and published figures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from anabranch.core.config.privacy import PrivacyTable, epsilon_text
from anabranch.core.privacy.accountant import coefficients, delta_of, epsilon_of, mu_of, sensitivity


def hockey_stick(epsilon: float, mu: float) -> float:
    """The definition: the integral of (p - e^epsilon q)_+ for normals at mu and 0, in a million steps."""
    # p > e^epsilon q exactly above this point.
    start = epsilon / mu + mu / 2
    x, step = np.linspace(start, start + 14, 1_000_001, retstep=True)
    p, q = (np.exp(-((x - at) ** 2) / 2) / math.sqrt(2 * math.pi) for at in (mu, 0.0))
    y = p - math.exp(epsilon) * q
    # Simpson's rule.
    return float(step / 3 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 2.5])
def test_delta_is_the_integral_of_its_definition(epsilon: float, mu: float) -> None:
    assert delta_of(epsilon, mu) == pytest.approx(hockey_stick(epsilon, mu), rel=1e-7, abs=1e-16)


@pytest.mark.parametrize(
    ("mu", "epsilon"),
    [(1.0, 4.886554), (0.5, 2.254085), (2.0, 10.997151), (1 / 0.6527, 8.0034)],
    ids=["1", "half", "2", "by-noise"],
)
def test_epsilons_are_those_of_another_accountant(mu: float, epsilon: float) -> None:
    # By the PLD accountant of dp-accounting, delta 1e-6.
    assert epsilon_of(mu, 1e-6) == pytest.approx(epsilon, abs=1e-4)


# By the PLD accountant of dp-accounting 0.6.0, in steps of 1e-4: mu, and epsilon at three deltas.
PUBLISHED = {
    0.25: (1.395616, 1.060702, 0.592007),
    0.5: (2.909732, 2.254085, 1.352276),
    1.0: (6.173935, 4.886554, 3.138671),
    2.0: (13.534772, 10.997151, 7.58128),
    4.0: (31.38184, 26.356964, 19.624121),
}


@pytest.mark.parametrize("mu", PUBLISHED)
def test_a_grid_of_epsilons_is_that_of_another_accountant(mu: float) -> None:
    ours = [epsilon_of(mu, delta) for delta in (1e-9, 1e-6, 1e-3)]
    assert ours == pytest.approx(PUBLISHED[mu], abs=2e-4)


@pytest.mark.parametrize("delta", [1e-9, 1e-6, 1e-2])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 8.0, 90.0, 2000.0])
def test_epsilon_and_mu_are_each_others_inverse(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-7)
    assert epsilon_of(mu, delta) <= epsilon * (1 + 1e-9), "never less noise than it takes"
    assert delta_of(epsilon, mu) <= delta
    assert delta_of(epsilon * (1 - 1e-6), mu) > delta


def test_no_difference_costs_nothing() -> None:
    assert epsilon_of(0.0, 1e-6) == 0.0
    assert epsilon_of(1e-9, 1e-6) == 0.0


def test_a_large_mu_costs_about_half_its_square() -> None:
    # delta <= P(L > epsilon) of the privacy loss L, which is normal: mean mu^2 / 2, deviation mu.
    epsilon = epsilon_of(100.0, 1e-6)
    assert 100.0**2 / 2 < epsilon < 100.0**2 / 2 + 100.0 * 4.76


def matrix(size: int, bands: int) -> np.ndarray:
    """The square root of the matrix of prefix sums, by its definition, cut to its bands."""
    # In floats of few digits: the root of a lower triangular Toeplitz matrix, coefficient by coefficient.
    root: list[float] = []
    for n in range(size):
        others = sum(root[i] * root[n - i] for i in range(1, n))
        root.append(1.0 if n == 0 else (1.0 - others) / 2)
    whole = np.array([[root[i - j] if i >= j else 0.0 for j in range(size)] for i in range(size)])
    return np.where(np.subtract.outer(range(size), range(size)) < bands, whole, 0.0)


def test_the_coefficients_are_the_root_of_the_prefix_sums() -> None:
    root = matrix(12, 12)
    assert np.allclose(root @ root, np.tril(np.ones((12, 12))), atol=1e-12)
    assert coefficients(12) == pytest.approx(root[:, 0])
    assert coefficients(5) == [1.0, 0.5, 0.375, 0.3125, 0.2734375]


def by_every_pattern(size: int, bands: int, apart: int, most: int) -> float:
    """The longest change of C x by a device of unit updates, over every time at which it may take part."""
    gram = matrix(size, bands).T @ matrix(size, bands)
    found = 0.0
    for count in range(1, most + 1):
        for times in itertools.combinations(range(size), count):
            if all(later - earlier >= apart for earlier, later in itertools.pairwise(times)):
                # Directions are the device's to choose: columns that meet may be made to add up.
                found = max(found, float(np.abs(gram[np.ix_(times, times)]).sum()))
    return math.sqrt(found)


@pytest.mark.parametrize(("bands", "apart", "most"), [(1, 1, 3), (2, 2, 3), (3, 3, 3), (3, 4, 2), (2, 5, 4)])
def test_the_sensitivity_is_that_of_the_worst_pattern(bands: int, apart: int, most: int) -> None:
    long_enough = apart * (most - 1) + bands
    assert sensitivity(bands, most) == pytest.approx(by_every_pattern(long_enough, bands, apart, most))
    assert sensitivity(bands, most) >= by_every_pattern(long_enough - 1, bands, apart, most) - 1e-12


def test_the_patterns_are_as_another_library_has_them() -> None:
    # jax_privacy's minsep_sensitivity_squared; its last columns are cut at n.
    assert by_every_pattern(8, 3, 3, 3) == pytest.approx(2.007797, abs=1e-6)
    assert by_every_pattern(4, 4, 2, 2) == pytest.approx(1.949559, abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(("participations", "separation", "bands"), [(1, 1, 1), (10, 4, 0), (5, 40, 0)])
def test_a_table_has_as_much_noise_as_its_epsilon_needs(
    epsilon: float, participations: int, separation: int, bands: int
) -> None:
    table = PrivacyTable(
        clip=0.5, epsilon=epsilon, participations=participations, separation=separation, bands=bands
    )
    promise = table.promise(10_000)
    assert promise is not None
    assert epsilon * (1 - 1e-4) < promise.epsilon <= epsilon
    assert promise.epsilon == promise.epsilon_so_far
    assert promise.bands == min(separation, 16)
    root = matrix(promise.bands, promise.bands)[:, 0]
    mu = math.sqrt(participations) * float(np.linalg.norm(root)) / promise.noise
    assert hockey_stick(promise.epsilon, mu) == pytest.approx(table.delta, rel=1e-5)


def test_what_was_promised_so_far_follows_of_the_versions_alone() -> None:
    table = PrivacyTable(clip=1.0, noise=1.0, participations=3, separation=4, bands=1)
    so_far = [p.epsilon_so_far for v in (0, 1, 4, 5, 8, 9, 13, 99) if (p := table.promise(v)) is not None]
    one, two, three = (epsilon_of(math.sqrt(k), 1e-6) for k in (1, 2, 3))
    assert so_far == [0.0, one, one, two, two, three, three, three]
    assert PrivacyTable().promise(5) is None


SAID = {
    8.0: "8",
    7.999996: "8",
    8.0000000001: "8",
    8.004: "8.01",
    12.449: "12.5",
    0.12341: "0.124",
    999.2: "1e+03",
    294.1717: "295",
    0.0: "0",
    math.inf: "inf",
    5.001e24: "5.01e+24",
    2e-9: "2e-09",
}


@pytest.mark.parametrize(("epsilon", "text"), SAID.items())
def test_no_less_is_said_than_what_is_promised(epsilon: float, text: str) -> None:
    assert epsilon_text(epsilon) == text
    assert float(text) >= epsilon * (1 - 1e-9)
