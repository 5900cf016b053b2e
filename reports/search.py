"""The page of a search for compression: the way that was taken, and every decision, from `search.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.reports.page import ACCURACY, card, document, grid, header, table
from anabranch.reports.plots import Series, plot
from anabranch.reports.scales import Axis
from anabranch.reports.text import BYTES, bytes_text, percent_text, safe

UPDATE = Axis("bytes of an update", BYTES)


def search_html(data: Mapping[str, Any]) -> str:
    """The whole page, self-contained. `data` is what `search.json` holds."""
    decisions = data["decisions"]
    taken = [d for d in decisions if d["taken"]]
    found = f"kept {data['kept']:g}, {data['bits']} bits"
    floor = taken[0]["accuracy"] - data["loss_max"]
    points = sorted((d["update_bytes"], d["accuracy"]) for d in taken)
    chart = plot([Series("taken", points)], UPDATE, ACCURACY, floor)
    caption = (
        "Each point is a pair that was taken, from the mildest (right) to the strongest (left); below the "
        "dashed line more accuracy is lost than is allowed. Judged on the validation part."
    )
    rows = (
        (
            f"{d['kept']:g}",
            str(d["bits"]),
            percent_text(d["accuracy"]),
            bytes_text(d["update_bytes"]),
            "yes" if d["taken"] else "",
            safe(d["why"]),
        )
        for d in decisions
    )
    listed = table(("kept", "bits", "accuracy", "an update", "taken", "why"), rows)
    body = [
        header("Search for compression", f"found: {found}"),
        grid([card("Accuracy over bytes", chart, caption), card("Decisions", listed)]),
    ]
    return document(f"Search: {found}", body)
