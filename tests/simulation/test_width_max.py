"""Simulated fleets whose devices do not all bear the whole model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import config, events, recorded

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, FleetTable, merge
from anabranch.core.effects import Granted
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.model.submodels import UnitMap
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate
from anabranch.workloads.profiles import speed_profile
from anabranch.workloads.traces import read_trace, write_trace

RANDOM = {"name": "random", "drop": 0.0}
HALF = {"clients": 8, "examples_per_client": 64, "widths_max": [1.0, 0.5]}


def widths(**fleet: Any) -> list[float]:
    found: list[float] = speed_profile(FleetTable(**{"clients": 40, **fleet}), 1).width_max.tolist()
    return found


@pytest.mark.parametrize("speed", ["levels", "lognormal", "fadas-mild"])
@pytest.mark.parametrize("dealt", [(1.0, 0.5), (1.0, 0.75, 0.25)])
def test_the_slower_bear_less(speed: str, dealt: tuple[float, ...]) -> None:
    fleet = FleetTable(clients=60, speed=speed, widths_max=dealt)
    profiles = speed_profile(fleet, 1)
    assert set(profiles.width_max) == set(dealt)
    order = profiles.width_max[np.argsort(profiles.group, kind="stable")]
    assert list(order) == sorted(order, reverse=True)
    if speed == "levels" and len(dealt) == 2:  # eight levels: as many of each
        assert Counter(order.tolist())[0.5] == pytest.approx(30, abs=4)


def test_by_chance_each_device_draws_whatever_its_speed_and_however_many_there_are() -> None:
    dealt: dict[str, Any] = {"widths_max": (1.0, 1.0, 1.0, 0.5), "widths_max_by": "chance"}
    many = widths(clients=2000, **dealt)
    assert many.count(0.5) == pytest.approx(500, abs=80)
    assert widths(**dealt) == many[:40]
    fleet = FleetTable(clients=2000, **dealt)
    profiles = speed_profile(fleet, 1)
    slow = profiles.group > profiles.group.mean()
    assert np.mean(profiles.width_max[slow] < 1) == pytest.approx(0.25, abs=0.05)


def test_without_a_word_all_bear_the_whole_model() -> None:
    assert set(widths()) == {1.0}


@pytest.mark.parametrize("width", [0.0, -0.1, 1.5])
def test_what_is_no_share_is_refused(width: float) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.widths_max must be above 0 and at most 1"):
        config(fleet={"widths_max": [1.0, width]})


def test_more_widths_than_speeds_cannot_be_dealt_by_speed() -> None:
    dealt = {"speed": "fadas-mild", "widths_max": (1.0, 0.75, 0.5, 0.25)}
    with pytest.raises(ConfigError, match=r"widths_max has 4 numbers.*there are 3.*widths_max_by = 'chance'"):
        widths(**dealt)
    assert len(set(widths(**dealt, widths_max_by="chance"))) == 4
    with pytest.raises(ConfigError, match=r"fleet\.widths_max_by must be one of speed, chance"):
        config(fleet={"widths_max_by": "luck"})


def parts(settings: Config) -> dict[str, set[float]]:
    """What each device has trained, as shares of the widest group."""
    found: dict[str, set[float]] = {}

    def observe(event: ev.Event, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                part = effect.task.submodel
                share = 1.0
                if isinstance(part, UnitMap):
                    sizes = [group.size for group in part.spec.groups]
                    share = max(len(u) / n for u, n in zip(part.kept, sizes, strict=True))
                found.setdefault(effect.task.client_id, set()).add(share)

    with open_simulation(settings) as simulation:
        simulation.world.observers.append(observe)
        simulation.run()
        assert simulation.faults is None or simulation.faults.counts["server-crash"] > 1
    return found


@pytest.mark.parametrize("waiting", ["ask", "called"])
@pytest.mark.parametrize("name", ["random", "heterofl"])
def test_nobody_trains_more_than_it_bears_and_all_train(name: str, waiting: str) -> None:
    settings = config(submodel={"name": name, "drop": 0.0}, fleet={**HALF, "waiting": waiting})
    bears = speed_profile(settings.fleet, settings.run.seed).width_max
    found = parts(settings)
    assert set(found) == {f"device-{i:04d}" for i in range(8)}
    for i, width_max in enumerate(bears):
        assert max(found[f"device-{i:04d}"]) <= width_max
    assert max(max(shares) for shares in found.values()) == 1.0


@pytest.mark.parametrize("waiting", ["ask", "called"])
def test_a_run_of_whole_models_goes_on_without_those_who_cannot(waiting: str, tmp_path: Path) -> None:
    settings = config(fleet={**HALF, "waiting": waiting})
    result, state = recorded(settings, tmp_path / "run")
    bears = speed_profile(settings.fleet, settings.run.seed).width_max
    refused = {f"device-{i:04d}" for i in range(8) if bears[i] < 1}
    assert (result.devices_unfit, len(refused)) == (4, 4)
    told = events(tmp_path / "run", "unfit")
    assert {e["client"] for e in told} == refused
    assert all("every task is of the whole model" in e["why"] for e in told)
    assert not refused & set(result.clients)
    assert not events(tmp_path / "run", "vanished")  # they never were there
    assert result.updates_applied > 10
    assert replay_run(tmp_path / "run").model_sha256 == result.model_sha256
    assert state


def test_those_left_out_change_nothing_for_the_others(tmp_path: Path) -> None:
    """As if a trace had them away: the same model, to the bit."""
    settings = config(fleet=HALF)
    bears = speed_profile(settings.fleet, settings.run.seed).width_max
    rows = [f"{i},0,{'on' if bears[i] == 1 else 'off'}" for i in range(8)]
    (tmp_path / "away.csv").write_text("\n".join(["device,time_s,state", *rows]))
    away = config(fleet={**HALF, "widths_max": [], "trace": str(tmp_path / "away.csv")})
    assert simulate(settings).model_sha256 == simulate(away).model_sha256 != simulate(config()).model_sha256


def test_a_fleet_that_bears_nothing_of_the_run_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no device of \[fleet\] could take part.*width_max is 0\.5"):
        simulate(config(fleet={**HALF, "widths_max": [0.5]}))
    simulate(config(fleet={**HALF, "widths_max": [0.5]}, submodel=RANDOM, run={"updates_max": 2}))


def test_a_crash_of_the_server_forgets_no_width() -> None:
    faults = {"server_crash_every_s": 4.0, "timeout_s": 5.0}
    more = {"faults": faults, "server": {"snapshot_every_updates": 1}}
    settings = merge([("base", config(submodel=RANDOM, fleet=HALF).to_json()), ("faults", more)])
    bears = speed_profile(settings.fleet, settings.run.seed).width_max
    for name, shares in parts(settings).items():
        assert max(shares) <= bears[int(name[-4:])]


def test_a_trace_says_it_of_its_devices(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,time_s,state,width_max\na,0,on,0.25\nb,0,on,\na,5,off,\na,6,on,0.25\n")
    found = read_trace(str(path))
    assert [device.width_max for device in found.devices] == [0.25, None]
    write_trace(found, tmp_path / "again.csv")
    assert read_trace(str(tmp_path / "again.csv")) == found
    fleet = {"clients": 4, "examples_per_client": 64, "trace": str(path), "widths_max": [0.75]}
    told = parts(config(submodel=RANDOM, fleet=fleet))
    assert {name: max(shares) for name, shares in told.items()} == {
        "device-0000": 0.25,
        "device-0001": 0.75,
        "device-0002": 0.25,
        "device-0003": 0.75,
    }


def test_a_trace_alone_may_say_that_nobody_bears_anything(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,time_s,width_max\na,0,0.5\nb,0,0.25\n")
    with pytest.raises(ConfigError, match=r"no device of \[fleet\] could take part.*width_max is 0\.5"):
        simulate(config(fleet={"clients": 4, "examples_per_client": 64, "trace": str(path)}))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("a,0,on,1.5", r"line 2: width_max must be above 0 and at most 1"),
        ("a,0,on,0", r"line 2: width_max must be above 0 and at most 1"),
        ("a,0,on,0.5\na,4,on,0.25", r"line 3: width_max must be one number of a device"),
        ("a,0,on,0.5\na,9,again,0.5", r"line 3: a row with 'again' has nothing else to say"),
    ],
)
def test_a_trace_with_something_else_is_refused(rows: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"device,time_s,state,width_max\n{rows}\n")
    with pytest.raises(DataError, match=why):
        read_trace(str(tmp_path / "t.csv"))
