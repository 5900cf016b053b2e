"""The defence: what was rejected and why, whom the rule has heard how much, who is in quarantine.

Of a private run also what it promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from anabranch.cockpit.series import thinned
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.config.secagg import SecaggTable
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.picture import Picture

BINS = 120
ROWS_MAX = 1000
POINTS = 1000


def defence(picture: Picture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rejections by reason, in all and along the run; devices with something against them."""
    devices, reasons = picture.devices, picture.threads.reasons
    numbers, times = picture.rejected["reason"], picture.rejected["time"]
    counts = {reasons[n]: int((numbers == n).sum()) for n in np.unique(numbers).tolist()}
    end = max(picture.now_s, 1e-9)
    edges = np.linspace(0.0, end, BINS + 1)
    by_reason = {
        name: np.histogram(times[numbers == reasons.number(name)], edges)[0].tolist() for name in counts
    }
    suspects = sorted(devices.flaws.items(), key=lambda item: (-sum(item[1]), devices.names[item[0]]))
    rule = dict(config.get("robust", {})).get("rule", "")
    promise = PrivacyTable.of_json(config).promise(picture.version + picture.count("sums_lost"))
    return {
        "rejected": counts,
        "series": {"time": plain((edges[:-1] + edges[1:]) / 2), "by_reason": by_reason},
        "clipped": _clipped(picture, config),
        "quarantined": [
            {"client": devices.names[row], "why": why, "at_s": at}
            for row, (why, at) in sorted(devices.quarantined.items(), key=lambda item: item[1][1] or 0.0)
        ],
        "flaws": [
            {"client": devices.names[row], "flaws": flaws, "shortened": shortened}
            for row, (flaws, shortened) in suspects[:ROWS_MAX]
        ],
        "rule": rule,
        "heard": heard(picture),
        "scores": scores(picture),
        "privacy": None if promise is None else asdict(promise),
    }


def _clipped(picture: Picture, config: Mapping[str, Any]) -> int | None:
    """How many updates `robust.clip` has cut; None where nobody counts what is cut, as in a private run."""
    otherwise = PrivacyTable.of_json(config).on or SecaggTable.of_json(config).on
    flaws = picture.devices.flaws.values()
    return sum(cut for _, cut in flaws) if picture.devices.flaws_told and not otherwise else None


def heard(picture: Picture) -> dict[str, Any]:
    """How much the robust rule has heard of each device, the least first, and of each version's updates."""
    devices, table = picture.devices, picture.heard
    rows = np.flatnonzero(devices.columns["weighed"] > 0)
    shares = devices.heard(rows)
    order = np.lexsort((rows, shares))[:ROWS_MAX]
    shown = rows[order]
    counts = devices.columns["weighed"][shown].tolist()
    found = zip(shown.tolist(), shares[order].tolist(), counts, strict=True)
    points = thinned(table["least"], POINTS)
    return {
        "of": len(rows),
        "devices": [{"client": devices.names[row], "heard": s, "updates": n} for row, s, n in found],
        "series": {name: plain(table[name][points]) for name in ("time", "version", "least", "middle")},
    }


def scores(picture: Picture) -> list[dict[str, Any]]:
    """The share of each device's updates that were rejected, the largest first; of those with any."""
    columns = picture.devices.columns
    rejected, taken = columns["rejected"], columns["updates"]
    rows = np.flatnonzero(rejected > 0)
    shares = rejected[rows] / (rejected[rows] + taken[rows])
    order = np.argsort(-shares, kind="stable")[:ROWS_MAX]
    return [
        {"client": picture.devices.names[row], "score": score}
        for row, score in zip(rows[order].tolist(), shares[order].tolist(), strict=True)
    ]
