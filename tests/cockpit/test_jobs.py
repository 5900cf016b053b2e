"""The cockpit of a server of several runs: all of them are shown, and an order goes to the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cockpits import Browser, entered
from served_jobs import add, jobs_server
from waits import until

from anabranch.server.job_folder import set_stopped


def listed(browser: Browser) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in browser.get("/api/runs")["runs"]}


def test_all_jobs_are_shown_and_ordered_each_by_its_name(tmp_path: Path) -> None:
    with jobs_server(tmp_path, "--ui", "127.0.0.1:0") as served:
        browser = Browser(served.printed.next("cockpit")["link"])
        assert browser.enter().status == 303
        session = browser.get("/api/session")
        assert (session["runs"], session["orders"]) == ("many", True)  # though there is none yet
        for name in ("one", "two"):
            served.add(name)
        served.train("one", 3)
        served.train("two", 5)
        rows = until(lambda: listed(browser), lambda rows: [r["updates"] for r in rows.values()] == [3, 5])
        assert list(rows) == ["one", "two"]
        for name, updates in (("one", 3), ("two", 5)):
            head = browser.get(f"/api/runs/{name}")
            assert (head["name"], head["counters"]["applied"]) == (name, updates)
            rows = browser.get(f"/api/runs/{name}/fleet")["rows"]
            assert [row["client"] for row in rows] == [f"of-{name}"]

        assert browser.order("two", "pause").status == 200
        assert (served.paused("one"), served.paused("two")) == (False, True)
        until(lambda: listed(browser), lambda rows: rows["two"]["state"] == "paused")
        assert listed(browser)["one"]["state"] == "running"

        set_stopped(tmp_path / "jobs" / "one", True)
        until(lambda: listed(browser), lambda rows: rows["one"]["state"] == "interrupted")
        assert "no job 'one' is served here now" in listed(browser)["one"]["why"]
        assert b"no job 'one' is served here now" in browser.order("one", "pause").body
        set_stopped(tmp_path / "jobs" / "one", False)
        until(lambda: listed(browser), lambda rows: rows["one"]["state"] == "running")

        (tmp_path / "jobs" / "one").rename(tmp_path / "gone")
        until(lambda: listed(browser), lambda rows: list(rows) == ["two"])
        add(tmp_path, "one")  # another run of the same name
        rows = until(lambda: listed(browser), lambda rows: len(rows) == 2)
        assert (rows["one"]["updates"], rows["two"]["updates"]) == (0, 5)
        assert browser.get("/api/runs/one")["counters"]["applied"] == 0


def test_a_cockpit_beside_it_is_of_all_or_of_one(tmp_path: Path) -> None:
    with jobs_server(tmp_path) as served:
        for name in ("one", "two"):
            served.add(name)
        admin = served.said["admin_address"]
        with entered("--admin", admin, cwd=tmp_path) as browser:
            assert list(listed(browser)) == ["one", "two"]
        with entered("--admin", f"{admin}/two", cwd=tmp_path) as browser:
            assert list(listed(browser)) == ["two"]
            assert browser.get("/api/session")["runs"] == 1
