"""The wire: bytes up and down against what they would be raw, codec by codec."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cockpit.asking import Asked
from anabranch.cockpit.series import down
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.picture import Picture

POINTS = 1000


def wire(picture: Picture, asked: Asked) -> dict[str, Any]:
    """Totals, their course, what each codec made of updates, and the schedule of codecs."""
    steps = picture.steps
    rows = np.unique(
        np.linspace(0, max(len(steps) - 1, 0), asked.whole("points", POINTS, 2, 20_000)).astype(np.int64)
    )
    rows = rows[: len(steps)]
    named = {"time": "time", "up": "up", "up_raw": "raw"}
    series = {name: plain(steps[column][rows]) for name, column in named.items()}
    series["down"] = down(picture, rows)
    totals = {name: picture.count(name) for name in ("up", "down", "up_raw", "down_full")}
    if any(totals[name] != (series[name] or [0])[-1] for name in ("up", "down")):  # since the last update
        for name, course in series.items():
            course.append(picture.now_s if name == "time" else totals[name])
    return {
        **totals,
        "series": series,
        "codecs": codecs(picture),
        "schedule": [
            {"version": version, "time_s": t, "uplink": uplink, "downlink": downlink}
            for version, t, uplink, downlink in picture.compression
        ],
    }


def codecs(picture: Picture) -> list[dict[str, Any]]:
    """What each codec made of updates; one of no name is not known."""
    columns, names = picture.threads.columns, picture.threads.codecs
    sent = columns["up"] > 0
    up, raw, codec = columns["up"][sent], columns["raw"][sent], columns["codec"][sent]
    found = []
    for number in np.unique(codec).tolist():
        of_it = codec == number
        size, full = int(up[of_it].sum()), int(raw[of_it].sum())
        row = {"codec": names[number], "updates": int(of_it.sum()), "bytes": size, "raw": full}
        found.append({**row, "ratio": full / size})
    return found
