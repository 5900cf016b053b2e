"""What the cockpit answers of a run, against sums over its events that are made here, one by one."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cockpits import SMALL, Browser, entered, simulated
from safetensors.numpy import load

from anabranch.cockpit.asking import Asked
from anabranch.cockpit.series import series
from anabranch.reports.picture.happening import Happened
from anabranch.reports.picture.picture import Picture
from anabranch.reports.result import Result

Event = dict[str, Any]


@pytest.fixture(scope="module")
def events(folder: Path) -> list[Event]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [e for e in events if e["kind"] == kind]


class Story:
    """A run, told event by event: what became of each task."""

    def __init__(self, events: list[Event]) -> None:
        self.tasks: dict[str, Event] = {}
        self.vanished: set[str] = set()
        waiting: list[Event] = []
        for e in events:
            if e["kind"] == "granted":
                start = {"client": e["client"], "base": e["version"], "left": e["time_s"], "verdict": "open"}
                self.tasks[e["task"]] = {**start, "version": None, "joined": None, "staleness": None}
                self.vanished.discard(e["client"])
            elif e["kind"] == "lease_ended":
                self.tasks[e["task"]] |= {"verdict": "lost", "joined": e["time_s"]}
            elif e["kind"] == "decided":
                task, self.vanished = self.tasks[e["task"]], self.vanished - {e["client"]}
                verdict = {"published": "applied"}.get(e["verdict"], e["verdict"])
                task |= {"verdict": verdict, "joined": e["time_s"], "staleness": e["staleness"], "told": e}
                task["version"] = e["version"] if verdict == "applied" else None
                waiting += [task][: verdict == "held"]
            elif e["kind"] == "published":
                for task in waiting:
                    task |= {"verdict": "applied", "version": e["version"]}
                waiting.clear()
            elif e["kind"] == "vanished":
                self.vanished.add(e["client"])

    def of(self, client: str) -> list[Event]:
        return [task for task in self.tasks.values() if task["client"] == client]


@pytest.fixture(scope="module")
def story(events: list[Event]) -> Story:
    return Story(events)


def test_the_list_and_the_head(browser: Browser, folder: Path, events: list[Event]) -> None:
    (row,) = browser.get("/api/runs")["runs"]
    result = Result.read(folder)
    assert (row["id"], row["kind"], row["state"]) == ("run", "simulated", "finished")
    assert (row["updates"], row["version"]) == (result.updates_applied, result.versions)
    assert (row["metric"], row["best"], row["seed"]) == (result.metric, result.best_value, 0)
    head = browser.get("/api/runs/run")
    assert {name: head[name] for name in row} == row
    assert head["config"] == result.config
    assert 'name = "' in head["config_toml"]
    assert head["counters"] == {
        "applied": result.updates_applied,
        "rejected": result.updates_rejected,
        "duplicate": len(of_kind(events, "resent")),
        "tasks": len(of_kind(events, "granted")),
        "leases_lost": len(of_kind(events, "lease_ended")),
        "clients": len(result.clients),
        "online": None,
        "up": result.uplink_bytes,
        "down": result.downlink_bytes,
        "up_raw": result.uplink_bytes_raw,
        "down_full": result.downlink_bytes_full_equivalent,
    }
    assert (head["judged_by"], head["units"]) == ("accuracy", "virtual")
    assert {"name": "accuracy", "mode": "max"} in head["metrics"]
    assert head["now_s"] == max(e["time_s"] for e in events)


def test_the_series(browser: Browser, folder: Path, events: list[Event]) -> None:
    found = browser.get("/api/runs/run/series", points=5000)
    judged = [e for e in of_kind(events, "decided") if e["verdict"] != "rejected"]
    assert found["time"] == [e["time_s"] for e in judged]
    assert found["updates"] == list(range(1, len(judged) + 1))
    assert found["staleness"] == [e["staleness"] for e in judged]
    up, down, then = 0, 0, []
    for e in events:
        up += e["uplink_bytes"] if e["kind"] == "decided" else 0
        down += e["bytes"] if e["kind"] == "downloaded" else 0
        then += [(e["version"], up, down)] if e in judged else []
    assert list(zip(found["version"], found["up"], found["down"], strict=True)) == then
    history = Result.read(folder).history
    accuracy = found["metrics"]["accuracy"]
    assert accuracy["value"] == [p.accuracy for p in history]
    assert accuracy["time"] == [p.time_s for p in history]
    assert accuracy["updates"] == [p.updates for p in history]
    assert accuracy["bytes"] == [p.uplink_bytes + p.downlink_bytes for p in history]


def test_a_thinned_series_keeps_its_peaks_and_its_ends(browser: Browser) -> None:
    whole = browser.get("/api/runs/run/series", points=5000)
    thin = browser.get("/api/runs/run/series", points=12)
    assert len(thin["time"]) <= 14 < len(whole["time"])
    assert (max(thin["staleness"]), min(thin["staleness"])) == (
        max(whole["staleness"]),
        min(whole["staleness"]),
    )
    assert (thin["time"][0], thin["time"][-1]) == (whole["time"][0], whole["time"][-1])
    rows = set(zip(whole["time"], whole["staleness"], strict=True))
    assert set(zip(thin["time"], thin["staleness"], strict=True)) <= rows
    middle = whole["time"][len(whole["time"]) // 2]
    late = browser.get("/api/runs/run/series", **{"points": 5000, "from": middle})
    assert late["time"] == [t for t in whole["time"] if t >= middle]


@pytest.mark.parametrize(("metrics", "each"), [(1, 400), (4, 400), (8, 200), (40, 100)])
def test_many_metrics_share_the_points_of_a_few(metrics: int, each: int) -> None:
    picture, versions = Picture(), 1000
    for version in range(versions):
        measured = {f"mae[{number}]": float(version % 7) for number in range(metrics)}
        picture.tell([Happened(1.0 * version, "evaluated", "", version, measured)])
    found = series(picture, Asked({"points": "400"}))["metrics"]
    assert len(found) == metrics
    for metric in found.values():
        assert each / 2 < len(metric["value"]) <= each + 2
        assert (metric["version"][0], metric["version"][-1]) == (0, versions - 1)
        assert (min(metric["value"]), max(metric["value"])) == (0.0, 6.0)


def test_the_river(browser: Browser, events: list[Event], story: Story) -> None:
    found = browser.get("/api/runs/run/river", limit=10_000)
    assert found["lanes"] == sorted({task["client"] for task in story.tasks.values()})
    assert (found["lanes_of"], found["thinned"]) == (6, False)
    published = [[e["version"], e["time_s"]] for e in of_kind(events, "published")]
    assert found["versions"] == [[0, 0.0], *published]
    columns = ("base", "left", "version", "joined", "staleness", "verdict")
    expected = [(t["client"], *(t[c] for c in columns)) for t in story.tasks.values()]
    assert sorted(map(str, expected)) == sorted(
        str((found["lanes"][lane], base, left, version, joined, staleness, verdict))
        for lane, base, left, version, joined, staleness, verdict, _ in found["threads"]
    )
    judged = sum(e["verdict"] != "rejected" for e in of_kind(events, "decided"))
    width = found["window"][1] / len(found["rates"])
    assert sum(rate * width for _, rate in found["rates"]) == pytest.approx(judged)


def test_a_part_of_the_river(browser: Browser, story: Story) -> None:
    whole = browser.get("/api/runs/run/river", limit=10_000)
    start, end = whole["versions"][3][1], whole["versions"][6][1]
    part = browser.get("/api/runs/run/river", **{"from": start, "to": end, "limit": 10_000})
    wanted = [
        t for t in story.tasks.values() if t["left"] <= end and (t["joined"] is None or t["joined"] >= start)
    ]
    assert len(part["threads"]) == len(wanted) < len(story.tasks)
    by_version = browser.get("/api/runs/run/river", **{"by": "version", "from": 3, "to": 5, "limit": 10_000})
    assert by_version["window"] == [start, end]
    assert by_version["threads"] == part["threads"]


def test_lanes_are_the_same_from_call_to_call(browser: Browser) -> None:
    first = browser.get("/api/runs/run/river", lanes=3)
    again = browser.get("/api/runs/run/river", lanes=3, limit=5)
    assert first["lanes"] == again["lanes"] == sorted(first["lanes"])
    assert len(first["lanes"]) == 3
    assert again["thinned"]
    assert all(thread in first["threads"] for thread in again["threads"])
    named = browser.get("/api/runs/run/river", clients="device-0004,device-0001")
    assert named["lanes"] == ["device-0004", "device-0001"]
    assert {lane for lane, *_ in named["threads"]} == {0, 1}


def fleet_of(events: list[Event], story: Story, folder: Path) -> dict[str, Event]:
    """Every row of the fleet."""
    result, version = Result.read(folder), max(e["version"] for e in of_kind(events, "published"))
    rows: dict[str, Event] = {}
    for client, share in result.clients.items():
        tasks = story.of(client)
        times = [t["joined"] - t["left"] for t in tasks if "told" in t][-9:]
        is_open = any(t["verdict"] == "open" for t in tasks)
        state = "offline" if client in story.vanished else "training" if is_open else "idle"
        seen = [e["time_s"] for e in events if e.get("client") == client and e["kind"] != "lease_ended"]
        rows[client] = {
            "state": state,
            "updates": share.updates,
            "rejected": share.rejected,
            "examples": share.examples,
            "staleness": share.staleness_mean,
            "up": share.uplink_bytes,
            "down": share.downlink_bytes,
            "behind": version - tasks[-1]["base"],
            "speed_s": statistics.median(times) if times else None,
            "seen_s": max(seen),
        }
    return rows


def test_the_fleet(browser: Browser, events: list[Event], story: Story, folder: Path) -> None:
    expected = fleet_of(events, story, folder)
    found = browser.get("/api/runs/run/fleet")
    assert [row["client"] for row in found["rows"]] == sorted(expected)
    assert found["total"] == found["matching"] == len(expected)
    for row in found["rows"]:
        for name, value in expected[row["client"]].items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
            assert row[name] == near, (row["client"], name)
    states = Counter(row["state"] for row in expected.values())
    assert found["states"] == {s: states[s] for s in ("idle", "training", "offline", "quarantined")}


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    ("sort", "field"),
    [
        *((name, name) for name in ("client", "updates", "rejected", "staleness", "up", "down", "behind")),
        *(("seen", "seen_s"), ("speed", "speed_s"), ("examples", "examples"), ("flaws", "flaws")),
    ],
)
def test_the_fleet_sorted(browser: Browser, sort: str, field: str, order: str) -> None:
    rows = browser.get("/api/runs/run/fleet", sort=sort, order=order)["rows"]
    values = [row[field] for row in rows]
    assert values == sorted(values, reverse=order == "desc")
    cut = browser.get("/api/runs/run/fleet", sort=sort, order=order, offset=2, limit=3)
    assert cut["rows"] == rows[2:5]


def test_the_fleet_filtered(browser: Browser, events: list[Event], story: Story, folder: Path) -> None:
    found = browser.get("/api/runs/run/fleet", filter="-0003")
    assert ([row["client"] for row in found["rows"]], found["matching"], found["total"]) == (
        ["device-0003"],
        1,
        6,
    )
    states = {client: row["state"] for client, row in fleet_of(events, story, folder).items()}
    for state in set(states.values()):
        rows = browser.get("/api/runs/run/fleet", state=state)["rows"]
        assert [row["client"] for row in rows] == sorted(c for c, s in states.items() if s == state)


def test_a_device(browser: Browser, story: Story) -> None:
    client = "device-0002"
    found = browser.get(f"/api/runs/run/devices/{client}")
    row = next(r for r in browser.get("/api/runs/run/fleet")["rows"] if r["client"] == client)
    assert {name: found[name] for name in row} == row
    its = {name: task for name, task in story.tasks.items() if task["client"] == client}
    assert [task["task"] for task in found["tasks"]] == list(its)[::-1]
    for task in found["tasks"]:
        expected = its[task["task"]]
        said = (
            task["base"],
            task["granted_s"],
            task["ended_s"],
            task["version"],
            task["verdict"],
            task["staleness"],
        )
        columns = ("base", "left", "joined", "version", "verdict", "staleness")
        assert said == tuple(expected[c] for c in columns)
        told = expected.get("told", {})
        assert (task["up"], task["reason"]) == (told.get("uplink_bytes", 0), told.get("reason", ""))
    losses = [(t["base"], t["told"]["metrics"]["loss"]) for t in its.values() if "told" in t]
    assert found["metrics"]["loss"]["version"] == [version for version, _ in losses]
    assert found["metrics"]["loss"]["value"] == pytest.approx([loss for _, loss in losses], rel=1e-6)


def test_the_wire(browser: Browser, folder: Path, events: list[Event]) -> None:
    found, result = browser.get("/api/runs/run/wire"), Result.read(folder)
    assert (found["up"], found["up_raw"]) == (result.uplink_bytes, result.uplink_bytes_raw)
    assert (found["down"], found["down_full"]) == (
        result.downlink_bytes,
        result.downlink_bytes_full_equivalent,
    )
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for e in of_kind(events, "decided"):
        for i, value in enumerate((1, e["uplink_bytes"], e.get("raw_bytes", e["uplink_bytes"]))):
            sums[e["codec"]][i] += value
    assert {r["codec"]: [r["updates"], r["bytes"], r["raw"]] for r in found["codecs"]} == sums
    assert all(r["ratio"] == r["raw"] / r["bytes"] for r in found["codecs"])
    steps = [(s.version, s.time_s, s.uplink, s.downlink) for s in result.compression]
    assert [(s["version"], s["time_s"], s["uplink"], s["downlink"]) for s in found["schedule"]] == steps
    assert found["series"]["up"] == sorted(found["series"]["up"])


def test_the_defence(browser: Browser, folder: Path) -> None:
    found, result = browser.get("/api/runs/run/defence"), Result.read(folder)
    assert found["rejected"] == result.rejections
    assert {name: sum(counts) for name, counts in found["series"]["by_reason"].items()} == result.rejections
    shares = {c: s.rejected / (s.rejected + s.updates) for c, s in result.clients.items() if s.rejected}
    assert {row["client"]: row["score"] for row in found["scores"]} == shares
    assert (found["quarantined"], found["privacy"]) == ([], None)
    assert (found["heard"]["of"], found["heard"]["devices"]) == (0, []), "the mean hears everybody"


def test_whom_a_rule_has_heard(tmp_path: Path) -> None:
    of_rule = ("strategy.name=fedbuff", "strategy.buffer_size=4", "robust.rule=trimmed_mean")
    run = simulated(tmp_path, *SMALL, *of_rule)
    heard = {c: s.heard for c, s in Result.read(run).clients.items() if s.heard is not None}
    with entered(run, cwd=tmp_path) as browser:
        found = browser.get("/api/runs/run/defence")["heard"]
        row = browser.get("/api/runs/run/fleet")["rows"][0]
    assert {row["client"]: row["heard"] for row in found["devices"]} == pytest.approx(heard)
    assert [row["heard"] for row in found["devices"]] == sorted(heard.values())
    assert (found["of"], row["heard"]) == (len(heard), pytest.approx(heard[row["client"]]))
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    told = [event for event in events if event["kind"] == "published"]
    shares = [[share for _, share in event["heard"]] for event in told]
    assert sum(row["updates"] for row in found["devices"]) == sum(map(len, shares))
    assert found["series"]["version"] == [event["version"] for event in told]
    assert found["series"]["least"] == pytest.approx([min(each) for each in shares])
    assert found["series"]["middle"] == pytest.approx([statistics.median(each) for each in shares])


def test_which_share_of_the_model_devices_train(tmp_path: Path) -> None:
    """The newest task's: half of the hidden units for the slower devices, the whole for the others."""
    of_parts = ("strategy.name=fedbuff", "submodel.name=heterofl", "submodel.widths=[1.0,0.5]")
    of_run = ("run.workload=synthetic", "fleet.clients=6", "run.updates_max=60")
    run = simulated(tmp_path, *of_parts, *of_run)
    events = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    newest = {e["client"]: e.get("share", 1.0) for e in of_kind(events, "granted")}
    half, whole = (20 * hidden + hidden + 10 * hidden + 10 for hidden in (16, 32))
    with entered(run, cwd=tmp_path) as browser:
        found = browser.get("/api/runs/run/fleet", sort="width", order="asc")
        (own,) = (browser.get(f"/api/runs/run/devices/{c}") for c in [found["rows"][0]["client"]])
    assert found["parts"]
    assert {row["client"]: row["width"] for row in found["rows"]} == pytest.approx(newest)
    assert {round(share, 4) for share in newest.values()} == {round(half / whole, 4), 1.0}
    widths = [row["width"] for row in found["rows"]]
    assert widths == sorted(widths)
    assert own["width"] == pytest.approx(half / whole, abs=1e-4)


def test_of_whole_models_no_share_is_shown(browser: Browser) -> None:
    found = browser.get("/api/runs/run/fleet")
    assert not found["parts"]
    assert {row["width"] for row in found["rows"]} == {None}


def test_what_a_private_run_promises(tmp_path: Path) -> None:
    of_private = ("strategy.name=fedbuff", "strategy.buffer_size=3", "privacy.clip=0.5", "privacy.epsilon=8")
    run = simulated(tmp_path, "run.workload=synthetic", "fleet.clients=6", *of_private, "run.versions_max=2")
    promise = Result.read(run).privacy
    assert promise is not None
    with entered(run, cwd=tmp_path) as browser:
        found = browser.get("/api/runs/run/defence")["privacy"]
    assert found == asdict(promise)
    assert 0 < found["epsilon_so_far"] <= found["epsilon"] <= 8


def test_a_folder_has_no_server_and_takes_no_orders(browser: Browser) -> None:
    answer = browser.ask("/api/runs/run/server")
    assert (answer.status, answer.json()["error"]) == (
        404,
        "this run has no server: it is read from a folder",
    )
    order = browser.post("/api/runs/run/orders", {"order": "pause"})
    assert order.status == 400
    assert "--admin" in order.json()["error"]


def test_the_model_goes_out(browser: Browser, folder: Path) -> None:
    answer = browser.ask("/api/runs/run/export")
    assert answer.body == (folder / "final.safetensors").read_bytes()
    assert load(answer.body)
    assert "run-newest.safetensors" in (answer.headers["content-disposition"] or "")
    version = Result.read(folder).versions
    assert browser.ask(f"/api/runs/run/export?version={version}").body == answer.body
    other = browser.ask("/api/runs/run/export?version=99999")
    assert (other.status, "it has kept" in other.json()["error"]) == (404, True)


@pytest.mark.parametrize("name", ["river", "series?points=2000", "fleet"])
def test_a_long_answer_comes_small_to_who_takes_it_so(browser: Browser, name: str) -> None:
    path = f"/api/runs/run/{name}"
    whole = browser.ask(path)
    small = browser.ask(path, **{"Accept-Encoding": "gzip, deflate, br"})
    assert (whole.headers["content-encoding"], small.headers["content-encoding"]) == (None, "gzip")
    assert small.headers["vary"] == "Accept-Encoding"
    assert len(small.body) == int(small.headers["content-length"]) < len(whole.body) / 2
    assert gzip.decompress(small.body) == whole.body


@pytest.mark.parametrize("name", ["export", "stream"])
def test_a_model_and_news_come_as_they_are(browser: Browser, name: str) -> None:
    answer = browser.ask(f"/api/runs/run/{name}", **{"Accept-Encoding": "gzip"})
    assert (answer.status, answer.headers["content-encoding"]) == (200, None)


def test_the_stream_of_a_run_that_is_over_says_so(browser: Browser, events: list[Event]) -> None:
    with browser.stream("run") as messages:
        (news, _, data), (ended, _, _) = messages
    assert (news, ended) == ("news", "ended")
    assert (data["state"], data["counters"]["tasks"]) == ("finished", len(of_kind(events, "granted")))


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("series?points=x", "points='x'"),
        ("series?points=1000000", "points='1000000'"),
        ("series?from=nan", "from='nan'"),
        ("river?by=date", "by='date'"),
        ("river?clients=nobody", "'nobody'"),
        ("fleet?sort=shoe", "sort='shoe'"),
        ("fleet?offset=-1", "offset='-1'"),
        ("fleet?state=happy", "state='happy'"),
        ("devices/nobody", "'nobody'"),
        ("export?version=-4", "version='-4'"),
    ],
)
def test_a_bad_question_is_named(browser: Browser, path: str, named: str) -> None:
    answer = browser.ask(f"/api/runs/run/{path}")
    assert answer.status == 400
    assert named in answer.json()["error"]
