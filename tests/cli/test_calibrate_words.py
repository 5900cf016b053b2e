"""What `calibrate` says of the devices that it has measured, and of how well they foretell the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_tables import lines_of

import anabranch as ab
from anabranch.cli.calibrating import calibrate
from anabranch.reports.text import duration_text, number_text, percent_text

RATES = (4.0, 0.5, 0.0, 1.0)
FLEET = ab.Measured(
    (0.02, 0.11, 0.05, 1e4),
    latencies_s=(0.03, 0.2, 0.07, 0.1),
    spreads=(0.5, 0.3, 0.0, 0.0),  # another draw takes another time
    up_mbps=RATES,
    down_mbps=RATES,
)


def test_each_figure_stands_in_its_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = ab.simulate(
        "synthetic",
        strategy="fedasync",
        fleet=ab.Fleet(clients=4, speed=FLEET),
        training=ab.Training(steps=4),
        until=ab.Until(updates=60),
    )
    found = ab.calibrate(run)
    calibrate(run.folder, out=tmp_path / "fleet.toml", foretell=True)
    said = capsys.readouterr().out
    rows = lines_of(said)
    assert rows[0] == ["device", "updates", "a step", "give or take", "one way", "Mbit/s"]
    assert [row[0] for row in rows[1:4]] == ["device-0000", "device-0001", "device-0002"]
    assert rows[1:4] == [
        [
            *(d.name, str(d.updates), duration_text(d.step_time_s), percent_text(d.spread)),
            *(duration_text(d.latency_s), number_text(d.mbps) if d.mbps else "no limit"),
        ]
        for d in found.devices
    ]
    assert rows[4] == ["", "measured", "simulated", "error"]
    figures = found.foretell()
    assert all(figure.measured != figure.foretold for figure in figures)
    assert rows[5:] == [
        [
            f.name,
            number_text(f.measured),
            number_text(f.foretold),
            f"{100 * f.foretold / f.measured - 100:+.0f} %",
        ]
        for f in figures
    ]
    assert "left out, as they have sent no update: device-0003\n" in said
