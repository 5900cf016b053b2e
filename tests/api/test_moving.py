"""docs/moving.md: what is brought along from another framework learns here, from its files as they stand."""

from __future__ import annotations

import threading
from pathlib import Path
from runpy import run_path

import pytest
from peoples_ports import SCRIPT, STUDY, written

import anabranch as ab
from anabranch.strategies.registry import doubt


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files in a folder of the reader's."""
    pytest.importorskip("sklearn", reason="the page's data come with scikit-learn")
    for name, text in written().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_that_received_and_sent_is_two_devices(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = run_path(str(files / SCRIPT))
    rounds = ab.strategies.FedAvg(clients_per_round=2, over_selection=1.0)
    with ab.Server(script["make_model"](), strategy=rounds, until=ab.Until(updates=8)) as server:
        sites = [
            threading.Thread(target=script["main"], args=(server.address, site, 2), daemon=True)
            for site in range(2)
        ]
        for site in sites:
            site.start()
        server.wait(timeout_s=300)
        for site in sites:
            site.join(300)
        assert server.status().version == 4
    said = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(said) == [f"site-{site}: round {version}" for site in range(2) for version in range(4)]


@pytest.mark.usefixtures("files")
def test_a_study_is_a_file_of_settings() -> None:
    run = ab.simulate(STUDY)
    first, last = run.result.history[0], run.result.history[-1]
    assert run.result.updates_applied == 40
    assert first.accuracy is not None
    assert last.accuracy is not None
    assert last.accuracy > first.accuracy + 0.2


def test_a_round_larger_than_the_fleet_is_said() -> None:
    """As those who come from rounds meet it: two devices, and nothing happens for a minute."""
    told = doubt(ab.strategies.FedAvg(), 2)
    assert told.startswith("strategy.clients_per_round is 10 and fleet.clients 2: the first round waits 60 s")
    assert not doubt(ab.strategies.FedAvg(clients_per_round=2), 2)
    assert "the first round waits for more devices without an end;" in doubt(
        ab.strategies.FedAvg(deadline_s=0.0), 2
    )
    assert doubt(ab.strategies.Phased(), 2) == f"strategy.phases[0]: {told}"
    assert not doubt(ab.strategies.Phased(), 10)
