"""What each device gave, and how much of it a robust rule has heard: bars, or one area for many devices."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from anabranch.reports.charts import Bar, bar_chart, ranked_area
from anabranch.reports.page import card, empty, table
from anabranch.reports.result import ClientShare
from anabranch.reports.scales import Axis
from anabranch.reports.text import NOTHING, bytes_text, count_text, number_text, percent_text, safe

BARS_MAX = 40
EXTREMES = 5
PARTS = (("applied", 0), ("rejected", 1))
HEARD = (("% heard", 0),)


def devices_card(clients: Mapping[str, ClientShare]) -> str:
    """Applied and rejected updates of each device, the busiest first, and a table of figures."""
    if not clients:
        return card("Devices", empty("No device took part."))
    ranked = sorted(clients.items(), key=lambda item: (-item[1].updates, -item[1].rejected, item[0]))
    bars = [Bar(name, (share.updates, share.rejected)) for name, share in ranked]
    if len(bars) <= BARS_MAX:
        chart = bar_chart(bars, PARTS, "updates of each device")
        shown = ranked
    else:
        x, y = Axis("devices, the busiest first", whole=True), Axis("updates", whole=True)
        chart = ranked_area(bars, PARTS, x, y)
        shown = ranked[:EXTREMES] + ranked[-EXTREMES:]
    some = "all" if shown is ranked else f"the {EXTREMES} busiest and the {EXTREMES} idlest"
    figures = f"<details><summary>Figures of {some} devices</summary>{_figures(shown)}</details>"
    return card("Contribution of each device", chart + figures, spread_text([s.updates for _, s in ranked]))


def heard_cards(clients: Mapping[str, ClientShare], rule: str) -> list[str]:
    """How much the robust rule has heard of each device, the least first; none where that is not said."""
    known = sorted((s.heard, name) for name, s in clients.items() if s.heard is not None)
    if not known:
        return []
    bars = [Bar(name, [round(100 * heard)]) for heard, name in known[:BARS_MAX]]
    some = f" The {BARS_MAX} least of {count_text(len(known))} devices." if len(known) > BARS_MAX else ""
    middle = percent_text(statistics.median(heard for heard, _ in known))
    told = (
        f"In per cent of its updates, on average; median {middle}.{some} "
        "Devices whose data are unlike the others' are heard less too."
    )
    title = f"What {rule.replace('_', ' ')} heard of each device"
    return [card(title, bar_chart(bars, HEARD, "share of each device's updates that the rule heard"), told)]


def spread_text(updates: list[int]) -> str:
    """How evenly the applied updates, most first, come from the devices."""
    total, count = sum(updates), len(updates)
    if not total:
        return f"{count_text(count)} devices took part; no update of theirs was applied."
    tenth = max(1, round(count / 10))
    share = 100 * sum(updates[:tenth]) / total
    idle = sum(n == 0 for n in updates)
    return (
        f"The busiest {count_text(tenth)} of {count_text(count)} devices made {share:.0f} % of the applied "
        f"updates; {count_text(idle)} made none. Median {statistics.median(updates):g} a device."
    )


def _figures(shown: list[tuple[str, ClientShare]]) -> str:
    ruled = any(s.heard is not None for _, s in shown)
    head = ("device", "applied", "rejected", "examples", "mean staleness", "uplink", "downlink")
    rows = [
        (
            safe(name),
            count_text(s.updates),
            count_text(s.rejected),
            count_text(s.examples),
            number_text(s.staleness_mean) if s.updates else NOTHING,
            bytes_text(s.uplink_bytes),
            bytes_text(s.downlink_bytes),
            *((percent_text(s.heard),) if ruled else ()),
        )
        for name, s in shown
    ]
    return table((*head, "heard") if ruled else head, rows)
