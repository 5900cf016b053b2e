"""`report.html`: a run on one page, from its `Result`, and the river from its events."""

from __future__ import annotations

from pathlib import Path

from anabranch.core.config.goal import Goal
from anabranch.core.config.privacy import epsilon_text
from anabranch.core.config.toml import setting_text
from anabranch.core.errors import DataError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY, LOSS
from anabranch.reports.against import AT, TITLES, Against, axis, ways
from anabranch.reports.charts import Bar, bar_chart, histogram
from anabranch.reports.compression import compression_cards, saving
from anabranch.reports.coverage import coverage_cards
from anabranch.reports.devices import PARTS, devices_card, heard_cards
from anabranch.reports.groups import fairness_card, group_cards
from anabranch.reports.metrics import (
    axis_of,
    heading,
    left_out_by,
    metric_names,
    metric_text,
    units_of,
    value,
)
from anabranch.reports.page import (
    SCRIPTS,
    card,
    columns,
    document,
    empty,
    flaws_text,
    fold,
    grid,
    header,
    notice,
    settings_table,
    table,
    tile,
    tiles,
)
from anabranch.reports.plots import Series, plot
from anabranch.reports.result import Result
from anabranch.reports.river import RIVER_SCRIPT, river_card, river_of
from anabranch.reports.scales import Axis
from anabranch.reports.settings import (
    PLACES,
    all_settings,
    changed,
    serve_commands,
    simulate_command,
)
from anabranch.reports.text import (
    NOTHING,
    PERCENT,
    bytes_text,
    count_text,
    duration_text,
    energy_text,
    number_text,
    percent_text,
    safe,
)

REPORT_FILE = "report.html"


def write_report(result: Result, folder: Path, run: Path | None = None) -> Path:
    """Writes `report.html` into a folder; `run` is that of the run, where the page goes elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    try:
        river = river_card(river_of(run or folder), result.kind)
    except DataError as error:  # a page without this figure is better than none
        river = river_card(None, result.kind, str(error))
    path.write_text(report_html(result, river), encoding="utf-8")
    return path


def report_html(result: Result, river: str = "") -> str:
    """The whole page, self-contained, with the card of its river."""
    title = f"{result.strategy} on {result.workload}"
    body = [
        header(title, _about(result)),
        _ended(result),
        tiles(_key_figures(result)),
        river,
        grid([*_metric_cards(result), *group_cards(result)]),
        *fairness_card(result),
        grid(compression_cards(result)),
        grid(coverage_cards(result)),
        columns(
            [_rejections_card(result), *heard_cards(result.clients, _rule(result))],
            [_staleness_card(result)],
            [devices_card(result.clients)],
        ),
        _config_card(result),
        _origin_card(result),
    ]
    return document(f"{title}, seed {result.seed}", body, (*SCRIPTS, RIVER_SCRIPT) if river else SCRIPTS)


def _about(r: Result) -> str:
    started = r.started_at.replace("T", " ") if r.started_at else ""
    told = [f"{r.kind} run", f"seed {r.seed}", started, f"anabranch {r.anabranch_version}"]
    return ", ".join(part for part in told if part)


def _ended(r: Result) -> str:
    """A line where the run did not come to its end as it should."""
    if r.status == "interrupted":
        return notice(
            f"This run was interrupted: {r.why or 'nobody knows why'}. What follows is what there was."
        )
    return notice(f"This run was given up: {r.given_up}.") if r.given_up else ""


def _privacy_tiles(r: Result) -> list[str]:
    """What a private run promises; nothing of any other."""
    if (p := r.privacy) is None:
        return []
    by = "" if r.masked is None else f" by each of {r.masked.who}"
    bound = f"{p.participations_max} updates of a {p.unit}, {p.separation} versions apart"
    bound += p.caveat and f"; {p.caveat}"
    return [
        tile("Epsilon", epsilon_text(p.epsilon), f"at delta {p.delta:g}; {bound}"),
        tile(
            "Epsilon so far",
            epsilon_text(p.epsilon_so_far),
            f"clip {p.clip:g}, noise {p.noise:.3g} clips{by}",
        ),
    ]


def _masked_tiles(r: Result) -> list[str]:
    """Whose word it took to see a sum. In a private run these are what adds its noise, and no tiles more."""
    if (m := r.masked) is None or r.privacy is not None:
        return []
    lost = f"{m.cohorts_lost} lost" if m.cohorts_lost else "none was lost"
    return [
        tile("Unmasked by", m.who, f"sums of {m.updates_min} updates and more; {lost}"),
        tile("Clip", f"{m.clip:g}", f"the length of an update; numbers of {m.bits} bits"),
    ]


def _energy_tiles(r: Result, to_target: str, missing: str) -> list[str]:
    """What a simulated fleet spent, where that is known."""
    if (e := r.energy) is None:
        return []
    spent = [
        f"{energy_text(j)} {what}" for j, what in ((e.train_j, "training"), (e.up_j + e.down_j, "moving"))
    ]
    reached = missing if e.to_target_j is None else energy_text(e.to_target_j)
    each = f"a device {energy_text(e.device_median_j)} in the median, the worst tenth"
    return [
        tile("Energy", energy_text(e.total_j), ", ".join(spent)),
        tile(f"Energy{to_target}", reached, f"{each} {energy_text(e.device_worst_tenth_j)}"),
    ]


def _rule(r: Result) -> str:
    return str(dict(r.config.get("robust", {})).get("rule", "the rule"))


def _key_figures(r: Result) -> list[str]:
    """12 of them, or two more of a private run or one with masked sums, and two more where energy is known.

    None leaves a row of one, however many stand side by side.
    """
    goal, decided = r.goal, r.updates_applied + r.updates_rejected
    set_ = goal.target is not None
    missing = "not reached" if set_ else NOTHING
    to_target = f" to {_target_text(goal)}" if set_ else " to target"
    no_target = "" if set_ else "no target was set"
    clock = "virtual" if r.kind == "simulated" else "since the start"
    s, judged = r.staleness, r.updates_applied > 0
    measured = _measured_tiles(r)
    return [
        *(measured if len(measured) > 1 else [*measured, _model_tile(r)]),
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
        *_privacy_tiles(r),
        *_masked_tiles(r),
        *_energy_tiles(r, to_target, missing),
        tile("Versions", count_text(r.versions), "published"),
        tile("Updates applied", count_text(r.updates_applied), _left_out_text(r) or _devices_text(r)),
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


def _measured_tiles(r: Result) -> list[str]:
    """The last and the best of what the run is judged by; or else the last of what is measured first."""
    name, goal = next(iter(metric_names([r])), ""), r.goal
    if not name:
        return [tile("Measured", "never" if not r.history else "nothing finite")]
    last, known = r.history[-1], [(v, p.version) for p in r.history if (v := value(p, name)) is not None]
    found = value(last, name)
    final = "not finite" if found is None else metric_text(name, found)
    tiles_ = [tile(f"Final {name}", final, f"at version {last.version}")]
    if name == goal.metric:
        best, version = max(known, key=lambda each: (goal.signed(each[0]), -each[1]))  # as the best file
        tiles_.append(tile(f"Best {name}", metric_text(name, best), f"at version {version}"))
    return tiles_


def _model_tile(r: Result) -> str:
    if not r.parameters:
        return tile("Model", NOTHING)
    return tile("Model", bytes_text(r.model_bytes), f"{count_text(r.parameters)} parameters and buffers")


def _target_text(goal: Goal) -> str:
    """`80 %`, `mse 0.02`."""
    assert goal.target is not None
    if units_of(goal.metric, [goal.target]) is PERCENT:
        return f"{100 * goal.target:g} %"
    if goal.metric == AUTO:  # nothing could count
        return f"{goal.target:g}"
    return f"{goal.metric} {goal.target:g}"


def _devices_text(r: Result) -> str:
    giving = sum(c.updates > 0 for c in r.clients.values())
    return f"{count_text(giving)} of {count_text(len(r.clients))} devices"


def _traffic(total: int, whole: int, updates: int) -> tuple[str, str]:
    each = f"{bytes_text(total / updates)} an update" if updates else ""
    return bytes_text(total), ", ".join(remark for remark in (each, saving(total, whole)) if remark)


def _metric_cards(r: Result) -> list[str]:
    names = metric_names([r])
    if not names:
        told = "No measurement was finite." if r.history else "No version of this run was evaluated."
        return [card("Measurements", empty(told))]
    return [_metric_card(r, *way) for way in ways(names)]


def _metric_card(r: Result, name: str, against: Against) -> str:
    at = AT[against]
    points = [(at(p), v) for p in r.history if (v := value(p, name)) is not None]
    flaws = [at(p) for p in r.history if value(p, name) is None]
    target = r.goal.target if name == r.goal.metric else None
    line = Series(name, points, {ACCURACY: 0, LOSS: 3}.get(name, 2), flaws=flaws)
    title, x = f"{heading(name)} over {TITLES[against]}", axis(against, r.kind)
    return card(title, plot([line], x, axis_of(name, [r]), target), flaws_text(len(flaws)))


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
        return card("Settings", empty("No configuration was recorded."))
    told = {k: v for k, v in changed(r.config).items() if k not in PLACES}
    caption = "The settings that are not as they are by default, and those of the strategy."
    whole = fold("All settings", settings_table(all_settings(r.config)))
    return card("Settings", settings_table(told) + _changes(r) + whole, caption)


def _left_out_text(r: Result) -> str:
    return f"{count_text(r.updates_left_out)} left out by {left_out_by(r)}" if r.updates_left_out else ""


def _changes(r: Result) -> str:
    """What was changed while the run went on, if anything was."""
    rows = [
        [
            f"<code>{safe(c.path)}</code>",
            f"<code>{safe(setting_text(c.was))}</code>",
            f"<code>{safe(setting_text(c.value))}</code>",
            safe(c.by),
            safe(duration_text(c.time_s)),
        ]
        for c in r.settings_changed
    ]
    head = ("setting", "from", "to", "by", "at")
    return f"<h3>changed while the run went on</h3>{table(head, rows)}" if rows else ""


def _origin_card(r: Result) -> str:
    rows = [("started", safe(r.started_at.replace("T", " ") or NOTHING)), ("host", safe(r.host or NOTHING))]
    if r.parameters:
        size = f"{count_text(r.parameters)} parameters and buffers, {bytes_text(r.model_bytes)}"
        rows.append(("model", safe(size)))
    ended = r.why or ("the end of its budget" if r.status == "finished" else "")
    rows += [
        (r.status, safe(ended or NOTHING)),
        ("model sha256", f"<code>{safe(r.model_sha256)}</code>"),
        ("journal sha256", f"<code>{safe(r.journal_sha256 or NOTHING)}</code>"),
        ("events, evaluations", f"{count_text(r.events)}, {count_text(len(r.history))}"),
        ("program", f"anabranch {safe(r.anabranch_version)}"),
    ]
    caption = "The digests of the final model and of the journal: equal runs have equal ones."
    return card("About this run", table((), rows) + _command(r), caption)


def _command(r: Result) -> str:
    """How to have the same run again, or one like it, where commands have it: Flower's runs are Flower's."""
    if dict(r.config.get("run", {})).get("workload") != r.workload:
        return ""
    if r.kind == "simulated":
        return f"<h3>the same run again</h3><pre>{safe(simulate_command(r.config))}</pre>"
    if "server" not in r.config or dict(r.config.get("flower", {})).get("train"):
        return ""
    return f"<h3>a run like it</h3><pre>{safe(serve_commands(r.config))}</pre>"
