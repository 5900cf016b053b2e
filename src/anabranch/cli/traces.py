"""`anabranch trace`: reads the trace of a fleet, or writes one out of the files of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.options import AsJson, Force, check_new, writing
from anabranch.cli.output import Output, Ticker
from anabranch.core.errors import ConfigError
from anabranch.reports.text import count_text, counted, duration_text, percent_text
from anabranch.workloads.trace_forms import fedscale, mobiperf, synthetic
from anabranch.workloads.traces import DAY_S, Trace, read_trace, write_trace


def _source(option: str, text: str) -> object:
    return typer.Option(option, help=text, metavar="FILE")


def trace(
    file: Annotated[Path, typer.Argument(help="The trace, a CSV file.", metavar="FILE")],
    fedscale_capacity: Annotated[
        Path | None, _source("--fedscale-capacity", "Write it from FedScale's client_device_capacity.")
    ] = None,
    fedscale_behaviour: Annotated[
        Path | None, _source("--fedscale-behaviour", "Write it from FedScale's client_behave_trace.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Examples in a step, for FedScale's times.", min=1)
    ] = 32,
    mobiperf_down: Annotated[
        Path | None, _source("--mobiperf-down", "Write it from MobiPerf's downloads, in JSON.")
    ] = None,
    mobiperf_up: Annotated[
        Path | None, _source("--mobiperf-up", "Write it from MobiPerf's uploads, in JSON.")
    ] = None,
    phones: Annotated[
        int, typer.Option("--synthetic", help="Write so many made-up phones.", metavar="N", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the made-up phones.", min=0)] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Read a trace and say what is in it; with a source, write it first."""
    output = Output(as_json)
    of_fedscale, of_mobiperf = fedscale_capacity or fedscale_behaviour, mobiperf_down or mobiperf_up
    if sum(map(bool, (of_fedscale, of_mobiperf, phones))) > 1:
        raise ConfigError("a trace has one source: FedScale's files, MobiPerf's, or --synthetic N")
    make: Callable[[], Trace] | None = None
    if of_fedscale:
        make = partial(fedscale, fedscale_capacity, fedscale_behaviour, batch)
    elif of_mobiperf:
        make = partial(mobiperf, mobiperf_down, mobiperf_up)
    elif phones:
        make = partial(synthetic, phones, seed)
    if make is not None:
        check_new(file, force)
    with Ticker(output) as ticker:
        if make is not None:
            _write(make, file, ticker)

        def show(rows: int) -> None:
            ticker.show(f"reading {file}: {count_text(rows)} rows", rows=rows)

        found = read_trace(str(file), show)
    _tell(output, file, found, written=make is not None)


def _write(make: Callable[[], Trace], file: Path, ticker: Ticker) -> None:
    ticker.show("making the trace")
    made = make()
    ticker.show(f"writing {file}")
    with writing(file):
        write_trace(made, file)


def _tell(output: Output, file: Path, found: Trace, written: bool) -> None:
    devices, span_s = found.devices, found.span_s
    share = sum(d.share_on(span_s) for d in devices) / len(devices)
    changes = sum(len(d.moments) - 1 for d in devices)
    again = sum(not math.isinf(d.again_s) for d in devices)
    timed = sum(d.step_time_s is not None for d in devices)
    output.result(
        {
            "file": str(file),
            "devices": len(devices),
            "changes": changes,
            "span_s": span_s,
            "share_on": share,
            "repeating": again,
            "with_step_time": timed,
            "with_links": found.has_rates,
            "there_by_hour": found.there_by_hour(),
        }
    )
    links = "as they are there" if found.has_rates else "of the fleet"
    output.say(
        f"{'written' if written else 'read'}: {file}\n"
        f"  {counted(len(devices), 'device')}, {counted(changes, 'change')} in {duration_text(span_s)}; "
        f"{count_text(again)} of them begin again\n"
        f"  there {percent_text(share)} of the time; links {links}; step times of {count_text(timed)}"
    )
    if span_s >= DAY_S:
        output.say(f"  there by hour: {' '.join(f'{100 * h:.0f}' for h in found.there_by_hour())} %")
    speed = " --set fleet.speed=traced" if timed == len(devices) else ""
    output.say(f"  anabranch simulate RUN.toml --set fleet.trace={file}{speed}")
