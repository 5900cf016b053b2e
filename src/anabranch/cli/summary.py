"""What a run came to, in the lines that several commands print alike."""

from __future__ import annotations

from pathlib import Path

from anabranch.reports.metrics import final_text, left_out_by, metric_text, no_share, nothing_learned
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.result import Result
from anabranch.reports.text import bytes_text, count_text, counted, duration_text, energy_text

MODELS = {"": FINAL, "the best version ": BEST}


def summary(result: Result, folder: Path | None) -> str:
    """A run in a few lines."""
    goal, reached = result.goal, "target not reached"
    if result.time_to_target_s is not None:
        reached = (
            f"target {metric_text(goal.metric, goal.target)} after {duration_text(result.time_to_target_s)}"
        )
    reasons = ", ".join(reason.replace("_", " ") for reason in result.rejections)
    left_out, rejected = result.updates_left_out, count_text(result.updates_rejected)
    updates = (
        f"{counted(result.versions, 'version')} of {counted(result.updates_applied, 'update')}, "
        + (f"{count_text(left_out)} of them left out by {left_out_by(result)}, " if left_out else "")
        + f"{rejected} rejected"
        + (f" ({reasons})" if reasons else "")
    )
    stale = f"staleness {result.staleness.mean:.2f} on average, {result.staleness.max} at most"
    traffic = f"{bytes_text(result.uplink_bytes)} up, {bytes_text(result.downlink_bytes)} down"
    target = f", {reached}" if goal.target is not None else ""
    lines = [
        f"{result.strategy} on {result.workload}, seed {result.seed}: {final_text(result)}{target}",
        f"  {updates}; {stale}",
        f"  {traffic}; {duration_text(result.wall_s)} of real time",
    ]
    if why := nothing_learned(result):
        lines.append(f"  {why}")
    if why := no_share(result):
        lines.append(f"  {why}")
    lines += [f"  {told.text()}" for told in (result.privacy, result.masked) if told is not None]
    if result.privacy is not None and result.why:  # its devices may give no more before the budget's end
        lines.append(f"  {result.why}")
    if (energy := result.energy) is not None:
        each = f"{energy_text(energy.device_median_j)} a device, {energy_text(energy.device_worst_tenth_j)}"
        reached = "" if energy.to_target_j is None else f", {energy_text(energy.to_target_j)} to the target"
        lines.append(f"  energy: {energy_text(energy.total_j)}{reached}; {each} in the worst tenth")
    if result.devices_unfit:
        unfit, there = result.devices_unfit, result.config["fleet"]["clients"]
        lines.append(f"  {unfit} of {there} devices were not let in: their memory bears no task of the run")
    if folder is not None:
        models = [f"{told}{folder / name}" for told, name in MODELS.items() if (folder / name).is_file()]
        lines += [f"  model: {', '.join(models)}"] if models else []
        lines.append(f"  report: {folder / 'report.html'}")
    return "\n".join(lines)
