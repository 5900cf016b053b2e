"""The page of a search for compression: the way that was taken, and every decision, from `search.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.core.config.goal import MAX
from anabranch.core.model.metrics import ACCURACY
from anabranch.reports.metrics import heading, metric_text, units_of
from anabranch.reports.page import card, document, grid, header, table
from anabranch.reports.plots import Series, plot
from anabranch.reports.scales import Axis
from anabranch.reports.text import BYTES, bytes_text, safe

UPDATE = Axis("bytes of an update", BYTES)


def search_html(data: Mapping[str, Any]) -> str:
    """The whole page, self-contained. `data` is what `search.json` holds."""
    decisions = data["decisions"]
    taken = [d for d in decisions if d["taken"]]
    found = f"kept {data['kept']:g}, {data['bits']} bits"
    metric, mode = data.get("metric", ACCURACY), data.get("mode", MAX)
    worse = "below" if mode == MAX else "above"
    points = sorted((d["update_bytes"], d[metric]) for d in taken if d[metric] is not None)
    best = taken[0][metric]
    limit = None if best is None else best - data["loss_max"] if mode == MAX else best + data["loss_max"]
    axis = Axis(metric, units_of(metric, (d[metric] for d in decisions)), from_zero=False)
    chart = plot([Series("taken", points)], UPDATE, axis, limit)
    caption = (
        f"Each point is a pair that was taken, from the mildest (right) to the strongest (left); {worse} the "
        f"dashed line more {metric} is lost than is allowed. Judged on the validation part."
    )
    rows = (
        (
            f"{d['kept']:g}",
            str(d["bits"]),
            metric_text(metric, d[metric]),
            bytes_text(d["update_bytes"]),
            "yes" if d["taken"] else "",
            safe(d["why"]),
        )
        for d in decisions
    )
    listed = table(("kept", "bits", metric, "an update", "taken", "why"), rows)
    body = [
        header("Search for compression", f"found: {found}"),
        grid([card(f"{heading(metric)} over bytes", chart, caption), card("Decisions", listed)]),
    ]
    return document(f"Search: {found}", body)
