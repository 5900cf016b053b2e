"""`report.html`: a run on one page, from its `Result` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from anabranch.reports.charts import Bar, Series, bar_chart, histogram, line_chart
from anabranch.reports.compression import compression_cards, saving
from anabranch.reports.coverage import coverage_cards
from anabranch.reports.devices import PARTS, devices_card
from anabranch.reports.page import (
    ACCURACY,
    LOSS,
    TRAFFIC,
    UPDATES,
    card,
    columns,
    document,
    empty,
    flat,
    grid,
    header,
    table,
    tile,
    tiles,
    time_axis,
)
from anabranch.reports.result import Point, Result
from anabranch.reports.scales import Axis
from anabranch.reports.text import (
    NOTHING,
    bytes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
    safe,
)

REPORT_FILE = "report.html"


def write_report(result: Result, folder: Path) -> Path:
    """Writes `report.html` into the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    path.write_text(report_html(result), encoding="utf-8")
    return path


def report_html(result: Result) -> str:
    """The whole page, self-contained."""
    title = f"{result.strategy} on {result.workload}"
    about = f"{result.kind} run, seed {result.seed}, anabranch {result.anabranch_version}"
    if result.status == "interrupted":
        about += f"; interrupted: {result.why}"
    body = [
        header(title, about),
        tiles(_key_figures(result)),
        grid(_accuracy_cards(result)),
        grid(compression_cards(result)),
        grid(coverage_cards(result)),
        columns(
            [_loss_card(result), _rejections_card(result)],
            [_staleness_card(result)],
            [devices_card(result.clients)],
        ),
        _config_card(result),
        _digests_card(result),
    ]
    return document(f"{title}, seed {result.seed}", body)


def _key_figures(r: Result) -> list[str]:
    target = r.target_accuracy
    missing = "not reached" if target > 0 else NOTHING
    decided = r.updates_applied + r.updates_rejected
    last = f"at version {r.history[-1].version}" if r.history else "never evaluated"
    best = next((p for p in r.history if p.accuracy == r.best_accuracy is not None), None)
    to_target = f" to {100 * target:g} %" if target > 0 else " to target"
    no_target = "" if target > 0 else "no target was set"
    clock = "virtual" if r.kind == "simulated" else "since the start"
    s, judged = r.staleness, r.updates_applied > 0
    return [
        tile("Final accuracy", percent_text(r.final_accuracy), last),
        tile("Best accuracy", percent_text(r.best_accuracy), f"at version {best.version}" if best else ""),
        tile(
            f"Time{to_target}",
            missing if r.time_to_target_s is None else duration_text(r.time_to_target_s),
            no_target or clock,
        ),
        tile(
            f"Traffic{to_target}",
            missing if r.bytes_to_target is None else bytes_text(r.bytes_to_target),
            no_target or "up and down",
        ),
        tile("Versions", count_text(r.versions), "published"),
        tile("Updates applied", count_text(r.updates_applied), _devices_text(r)),
        tile(
            "Updates rejected",
            count_text(r.updates_rejected),
            f"{percent_text(r.updates_rejected / decided)} of all" if decided else "",
        ),
        tile("Uplink", *_traffic(r.uplink_bytes, r.uplink_bytes_raw, decided)),
        tile("Downlink", *_traffic(r.downlink_bytes, r.downlink_bytes_full_equivalent, decided)),
        tile("Mean staleness", number_text(s.mean) if judged else NOTHING, "versions"),
        tile("Greatest staleness", count_text(s.max) if judged else NOTHING, "versions"),
        tile(
            "Wall time",
            duration_text(r.wall_s),
            "" if r.virtual_s is None else f"{duration_text(r.virtual_s)} virtual",
        ),
    ]


def _devices_text(r: Result) -> str:
    giving = sum(c.updates > 0 for c in r.clients.values())
    return f"{count_text(giving)} of {count_text(len(r.clients))} devices"


def _traffic(total: int, whole: int, updates: int) -> tuple[str, str]:
    each = f"{bytes_text(total / updates)} an update" if updates else ""
    return bytes_text(total), ", ".join(remark for remark in (each, saving(total, whole)) if remark)


def _accuracy_cards(r: Result) -> list[str]:
    ways: list[tuple[str, Axis, Callable[[Point], float]]] = [
        ("Accuracy over time", time_axis(r.kind), lambda p: p.time_s),
        ("Accuracy over updates", UPDATES, lambda p: p.updates),
        ("Accuracy over traffic", TRAFFIC, lambda p: p.uplink_bytes + p.downlink_bytes),
    ]
    if not r.history:
        return [card("Accuracy", empty("No version of this run was evaluated."))]
    target = r.target_accuracy if r.target_accuracy > 0 else None
    cards = []
    for title, x, at in ways:
        line = Series(r.strategy, [(at(p), p.accuracy) for p in r.history if p.accuracy is not None])
        cards.append(card(title, line_chart([line], x, ACCURACY, target)))
    return cards


def _loss_card(r: Result) -> str:
    points = [(p.time_s, p.loss) for p in r.history if p.loss is not None]
    left_out = len(r.history) - len(points)
    caption = f"{left_out} evaluations had a loss that was not finite; they are left out." if left_out else ""
    if not points:
        return card("Loss", empty("No finite loss was recorded."), caption)
    return card("Loss", line_chart([Series("loss", points, 3)], time_axis(r.kind), LOSS), caption)


def _staleness_card(r: Result) -> str:
    s = r.staleness
    if not s.histogram:
        return card("Staleness", empty("No update was applied."))
    chart = histogram(s.histogram, Axis("staleness (versions)"), Axis("applied updates", whole=True))
    caption = f"Mean {number_text(s.mean)}, median {s.p50}, 90th percentile {s.p90}, greatest {s.max}."
    return card("Staleness", chart, caption)


def _rejections_card(r: Result) -> str:
    if not r.rejections:
        return card("Rejections", empty("No update was rejected."))
    ranked = sorted(r.rejections.items(), key=lambda item: -item[1])
    bars = [Bar(reason.replace("_", " "), [n]) for reason, n in ranked]
    return card("Rejections by reason", bar_chart(bars, PARTS[1:], "rejected updates by reason"))


def _config_card(r: Result) -> str:
    if not r.config:
        return card("Configuration", empty("No configuration was recorded."))
    tables = {k: v for k, v in r.config.items() if isinstance(v, Mapping)}
    single = {k: v for k, v in r.config.items() if k not in tables}
    blocks = [_settings(f"[{name}]", keys) for name, keys in tables.items() if keys]
    if single:
        blocks.insert(0, _settings("top level", single))
    return card("Configuration", f'<div class="settings">{"".join(blocks)}</div>')


def _settings(title: str, keys: Mapping[str, object]) -> str:
    rows = [(f"<code>{safe(k)}</code>", f"<code>{_value(v)}</code>") for k, v in flat(keys).items()]
    return f"<div><h3>{safe(title)}</h3>{table((), rows)}</div>"


def _value(value: object) -> str:
    """A setting as TOML would spell it, nearly."""
    return safe(str(value).lower() if isinstance(value, bool) else value if value != "" else '""')


def _digests_card(r: Result) -> str:
    rows = [
        ("model sha256", f"<code>{safe(r.model_sha256)}</code>"),
        ("journal sha256", f"<code>{safe(r.journal_sha256)}</code>"),
        ("events recorded", count_text(r.events)),
        ("evaluations", count_text(len(r.history))),
        ("program", f"anabranch {safe(r.anabranch_version)}"),
    ]
    caption = "The digests of the final model and of the journal: equal runs have equal ones."
    return card("Digests", table(("what", "value"), rows), caption)
