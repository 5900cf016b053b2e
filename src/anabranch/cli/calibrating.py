"""`anabranch calibrate`: the devices of a run as a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.calibrating import Calibration, Foretold, MeasuredDevice
from anabranch.api.calibrating import calibrate as calibrate_run
from anabranch.api.run import open_run
from anabranch.cli.next_steps import command_line
from anabranch.cli.options import AsJson, Force, RunFolder, file_to_write, writing
from anabranch.cli.output import Output
from anabranch.cli.overall import bar_or_lines
from anabranch.cli.parts import LoadCode
from anabranch.reports.text import NOTHING, count_text, duration_text, number_text, percent_text
from anabranch.simulation.run import RunProgress

CALIBRATED = Path("calibrated.toml")
SHOWN_MAX = 20  # devices


def calibrate(
    folder: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help=f"The file of settings to write; {CALIBRATED} if not given.", metavar="FILE"
        ),
    ] = None,
    force: Force = False,
    foretell: Annotated[
        bool, typer.Option("--foretell", help="Simulate the run with it, and say how far it was off.")
    ] = False,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure the devices of a run by its log, and write a simulated fleet like them."""
    output = Output(as_json)
    out = file_to_write(out, CALIBRATED, force)
    found = calibrate_run(open_run(folder, load_code=load_code))
    with writing(out):
        found.save(out)
    foretold = _foretold(output, found) if foretell else ()
    output.result(
        {
            "file": str(out),
            "devices": [asdict(device) for device in found.devices],
            "silent": list(found.silent),
            "foretold": [{**asdict(figure), "error": figure.error} for figure in foretold],
        }
    )
    _tell(output, found)
    if foretold:
        output.table("foretold", ["", "measured", "simulated", "error"], [_figure(f) for f in foretold])
    output.say(f"written: {out}\n  {command_line('simulate', out)}")


def _foretold(output: Output, found: Calibration) -> Sequence[Foretold]:
    updates = max(1, found.run.result.updates_applied)
    with bar_or_lines(output, patient=True) as show:

        def tell(p: RunProgress) -> None:
            show(min(1.0, p.updates / updates), "foretelling", updates=p.updates)

        return found.foretell(callbacks=[tell])


def _tell(output: Output, found: Calibration) -> None:
    columns = ["device", "updates", "a step", "give or take", "one way", "Mbit/s"]
    output.table(
        f"{count_text(len(found.devices))} devices", columns, [_row(d) for d in found.devices[:SHOWN_MAX]]
    )
    if (more := len(found.devices) - SHOWN_MAX) > 0:
        output.say(f"and {count_text(more)} more")
    if found.silent:
        output.say(f"left out, as they have sent no update: {', '.join(found.silent[:SHOWN_MAX])}")


def _row(device: MeasuredDevice) -> list[str]:
    rate = number_text(device.mbps) if device.mbps else "no limit"
    return [
        device.name,
        count_text(device.updates),
        duration_text(device.step_time_s),
        percent_text(device.spread),
        duration_text(device.latency_s),
        rate,
    ]


def _figure(figure: Foretold) -> list[str]:
    error = NOTHING if figure.error is None else f"{100 * figure.error:+.0f} %"
    return [figure.name, number_text(figure.measured), number_text(figure.foretold), error]
