"""Options that several commands share, and the lines that they print alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.core.config.tables import parse_override
from anabranch.core.errors import NO_SPACE, ConfigError, disk_error
from anabranch.reports.metrics import final_text, metric_text
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.result import Result
from anabranch.reports.text import bytes_text, counted, duration_text, energy_text

MODELS = {"": FINAL, "the best version ": BEST}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: table.key=value. Repeatable.", metavar="KEY=VALUE"),
]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write.", metavar="DIR")]
ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file.", metavar="CONFIG")]
Identity = Annotated[
    Path | None,
    typer.Option("--identity", help="What `anabranch admin operator` wrote.", metavar="DIR"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Speak to another machine without encryption or authentication.")
]
FlowerFolder = Annotated[
    Path | None, typer.Option("--flower", help="A Flower app's folder, as the App.", metavar="DIR")
]
Archive = Annotated[
    Path | None,
    typer.Option("--archive", help="The server.archive of what the log has dropped.", metavar="DIR"),
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")]


def parse_shard(text: str) -> tuple[int, int]:
    """`3/8` as (index, count), from 0. Raises `ConfigError`."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--shard {text!r}: write INDEX/COUNT with INDEX from 0, for example 3/8")
    return int(index), int(count)


def app_spec(app: str, flower: Path | None) -> str:
    """The App that was named, in one of the two ways. Raises `ConfigError`."""
    if bool(app) == (flower is not None):
        raise ConfigError("name one App: APP, or --flower DIR for the folder of a Flower app")
    return app or f"flower:{flower}"


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` as a pair; the value is read as TOML, or else as a string. Raises `ConfigError`."""
    key, equals, _ = text.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"--option {text!r}: write key=value")
    _, name, value = parse_override(f"option.{text}")
    return name, value


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, a folder is written: a full disk is said of it. Raises `StoreFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise disk_error(folder, error) from error


def run_folder(name: str, strategy: str, seed: int | str) -> Path:
    """Where a run goes if nobody says where: runs/<name>-<strategy>-seed<seed>; or `seeds`, of several."""
    last = seed if isinstance(seed, str) else f"seed{seed}"
    return Path("runs") / f"{name}-{short_name(strategy)}-{last}"


def parse_seeds(text: str) -> list[int]:
    """`0..4` as 0, 1, 2, 3, 4, and `1,3,7` as these. Raises `ConfigError`."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    if not all(word.strip().isdecimal() for word in words) or (dots and int(first) > int(last)):
        raise ConfigError(f"--seeds {text!r}: write FROM..TO, for example 0..4, or 1,3,7")
    return list(range(int(first), int(last) + 1)) if dots else list(dict.fromkeys(map(int, words)))


def short_name(part: str) -> str:
    """What a part is called in a file's name: `Mine` for `path/to/file.py:Mine`."""
    return part.rpartition(":")[2]


def summary(result: Result, folder: Path | None) -> str:
    """A run in a few lines."""
    goal, reached = result.goal, "target not reached"
    if result.time_to_target_s is not None:
        reached = (
            f"target {metric_text(goal.metric, goal.target)} after {duration_text(result.time_to_target_s)}"
        )
    reasons = ", ".join(reason.replace("_", " ") for reason in result.rejections)
    updates = (
        f"{counted(result.versions, 'version')} of {counted(result.updates_applied, 'update')}, "
        f"{result.updates_rejected} rejected" + (f" ({reasons})" if reasons else "")
    )
    stale = f"staleness {result.staleness.mean:.2f} on average, {result.staleness.max} at most"
    traffic = f"{bytes_text(result.uplink_bytes)} up, {bytes_text(result.downlink_bytes)} down"
    target = f", {reached}" if goal.target is not None else ""
    lines = [
        f"{result.strategy} on {result.workload}, seed {result.seed}: {final_text(result)}{target}",
        f"  {updates}; {stale}",
        f"  {traffic}; {duration_text(result.wall_s)} of real time",
    ]
    if result.updates_applied and not result.versions:
        lines.append(
            "  nothing was learned: so few updates fill no buffer of the strategy's, and no round; give the "
            "run more of them, or the strategy a smaller size"
        )
    lines += [f"  {told.text()}" for told in (result.privacy, result.masked) if told is not None]
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
