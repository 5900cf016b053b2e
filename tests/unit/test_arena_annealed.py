"""The arena's own strategy: its path by a reference of plain lists, how its buffers grow, parts."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anabranch

ANNEALED = f"{Path(__file__).parents[2]}/benchmarks/arena/annealed.py:Annealed"
Sent = tuple[int, list[float], list[int]]  # base version, values, coordinates
START, ALL = [0.5, -1.0, 2.0], [0, 1, 2]


def ends(count: int, least: int, rho: float) -> list[int]:
    """After how many updates there is a version."""
    found, taken = [0], 0
    while taken < count:
        size = least
        while size + 1 <= rho * taken:
            size += 1
        taken += size
        found.append(taken)
    return found


def script(count: int, least: int, rho: float, parts: bool) -> list[Sent]:
    """Updates of bases up to four versions old."""
    rng, found, borders = np.random.default_rng(7), [], ends(count, least, rho)
    for i in range(count):
        version = sum(border <= i for border in borders) - 1
        at = sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist()) if parts else ALL
        base = version - int(rng.integers(0, min(4, version) + 1))
        found.append((base, rng.standard_normal(len(at)).tolist(), at))
    return found


def path(sent: list[Sent], borders: list[int], eta: float) -> list[list[float]]:
    """The versions, coordinate by coordinate."""
    versions = [START]
    for first, last in itertools.pairwise(borders):
        if last > len(sent):
            break
        sums, shares = [0.0] * 3, [0.0] * 3
        for base, values, at in sent[first:last]:
            weight = 1 / math.sqrt(1 + len(versions) - 1 - base)
            for j, value in zip(at, values, strict=True):
                sums[j] += weight * value
                shares[j] += weight
        moved = [s / share if share else 0.0 for s, share in zip(sums, shares, strict=True)]
        versions.append([w + eta * m for w, m in zip(versions[-1], moved, strict=True)])
    return versions


def aggregated(sent: list[Sent], params: dict[str, Any]) -> Any:
    updates = [
        anabranch.Update(
            f"c{i % 4}",
            f"t{i}",
            base,
            1 + i,
            {"w": np.array(values)},
            submodel=None if at == ALL else {"w": np.array(at)},
        )
        for i, (base, values, at) in enumerate(sent)
    ]
    return anabranch.aggregate(ANNEALED, params, {"w": np.array(START)}, updates)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(("least", "rho", "eta"), [(2, 0.25, 1.0), (1, 0.5, 0.5), (3, 0.0, 1.0)])
def test_golden_path(least: int, rho: float, eta: float, parts: bool) -> None:
    count = 40
    borders, sent = ends(count, least, rho), script(count, least, rho, parts)
    expected = path(sent, borders, eta)
    params = {"buffer_size": least, "growth": rho, "server_lr": eta}
    for version, border in enumerate(borders[: len(expected)]):
        found = aggregated(sent[:border], params)
        assert found.version == version
        np.testing.assert_allclose(found.model["w"], expected[version], rtol=1e-10, atol=1e-12)


def test_a_buffer_is_a_fixed_part_of_what_came_before() -> None:
    assert ends(40, 2, 0.25) == [0, 2, 4, 6, 8, 10, 12, 15, 18, 22, 27, 33, 41]
    found = aggregated([(0, [1.0, 0.0, 0.0], ALL)] * 41, {"buffer_size": 2, "growth": 0.25})
    assert found.version == 12


def test_it_starts_as_fedbuff_whose_weights_are_divided_out() -> None:
    """Fresh updates weigh 1, so there is nothing to divide by but their number."""
    sent = [(i // 4, [float(i), 1.0, -0.5], ALL) for i in range(12)]
    updates = [anabranch.Update("a", f"t{i}", b, 1, {"w": np.array(v)}) for i, (b, v, _) in enumerate(sent)]
    other = anabranch.aggregate("fedbuff", {"buffer_size": 4}, {"w": np.array(START)}, updates)
    mine = aggregated(sent, {"buffer_size": 4, "growth": 0.02})
    np.testing.assert_allclose(mine.model["w"], other.model["w"], rtol=1e-12)
