"""What a server's log says of its run. Time is arithmetic: nothing is waited for."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from machines import Bench
from masked_bench import MaskedBench

from anabranch.core import events as ev
from anabranch.core.effects import RolledBackTo, Unbarred
from anabranch.core.model.updates import Ask
from anabranch.host.secagg import mask_sum_arrived
from anabranch.server.chronicle import GATHERED_S, HANG_S, STALL_S, STARVING_S, Chronicle, Coming, Standing
from anabranch.server.glance import Glances


class Logged:
    """An engine, its chronicle, and the lines that this has written."""

    def __init__(self, caplog: pytest.LogCaptureFixture, strategy: str = "fedbuff", **options: Any) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO)
        self.bench = Bench(strategy, **options)
        self.glance = Glances(self.bench.engine).take
        self.chronicle = Chronicle(self.glance, 0.0)

    def do(self, event: ev.Event) -> None:
        """One event."""
        self.chronicle.hear(event.now, self.bench.do(event))

    def ask(self, client: str, now: float) -> None:
        """Ask for a task, named after the client and the moment; a refusal is heard as well."""
        event = ev.TaskAsked(now, Ask(client, f"{client}{now}"))
        refused = self.bench.engine.refusal(event.ask, now)
        self.chronicle.hear(now, [refused] if refused else self.bench.do(event))

    def work(self, client: str, now: float, flaw: str = "") -> None:
        """Ask, and push at once."""
        self.ask(client, now)
        effects = self.bench.push(client, f"{client}{now}", now=now, flaw=flaw)
        self.chronicle.hear(now, effects)

    def look(self, now: float) -> None:
        """As the server does every second."""
        if self.chronicle.look(now):
            self.chronicle.stalled(Standing.of(self.bench.engine), now)

    def lines(self) -> list[tuple[str, str]]:
        """Level and text of what was written since the last call."""
        found = [(r.levelname, r.getMessage()) for r in self._caplog.records]
        self._caplog.clear()
        return found

    def fields(self) -> dict[str, Any]:
        """Of the newest line."""
        return dict(vars(self._caplog.records[-1])["fields"])


def test_a_version_is_a_line_and_many_within_a_second_are_one(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, buffer_size=2)
    log.bench.enrol("a", "b")
    for client in "ab":
        log.work(client, 5.0)
    assert log.fields() == {"version": 1, "versions": 1, "updates": 2, "staleness": 0.0}
    assert log.lines() == [("INFO", "version 1: 2 updates, staleness 0.0 on average")]
    for number in range(20):
        log.work("ab"[number % 2], 5.1 + number / 100)
    assert log.lines() == [], "they are gathered"
    log.look(6.0)
    assert log.fields()["versions"] == 10
    assert log.lines() == [("INFO", "versions 2 to 11: 20 updates, staleness 0.0 on average")]
    log.look(7.0)
    assert log.lines() == []


def test_a_version_has_its_own_updates_though_some_came_before_this_server_or_another_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog, buffer_size=2)
    log.bench.enrol("a", "b")
    log.work("a", 1.0)
    log.chronicle = Chronicle(log.glance, 2.0)  # as after a restart
    log.work("b", 2.0)
    assert log.lines() == [("INFO", "version 1: 2 updates, staleness 0.0 on average")]
    b = MaskedBench()
    b.enrol(*"abcd")
    told = Chronicle(Glances(b.engine).take, 0.0)
    for at, client in enumerate("abcda"):
        effects = b.give(client, f"{client}{at}", (4, 0, 0, 0), now=at)
        told.hear(at, effects)
    told.hear(6.0, b.answer(1))
    told.hear(8.0, b.answer(2))
    assert [text for _, text in log.lines()] == [
        "version 1: 2 updates, staleness 0.0 on average",
        "version 2: 2 updates, staleness 0.0 on average",
    ]


def test_a_buffer_that_is_large_beside_its_fleet_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """At the first version alone: by the next there may be more devices, or it was heard."""
    log = Logged(caplog, buffer_size=3)
    log.bench.enrol("a", "b")
    for number in range(6):
        log.work("ab"[number % 2], float(number))
    first, *later = log.lines()
    assert first[0] == "WARNING"
    assert first[1].startswith("version 1 took 3 updates, and 2 devices are enrolled: ")
    assert "WARNING" not in [level for level, _ in later]


def test_a_buffer_of_as_many_as_there_are_devices_is_as_good_as_any(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, buffer_size=2)
    log.bench.enrol("a", "b")
    for number in range(2):
        log.work("a", float(number))
    assert log.lines() == [("INFO", "version 1: 2 updates, staleness 0.0 on average")]


def test_lines_of_versions_come_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """Once a second at first; a day of a busy server is no more than a line a minute."""
    log = Logged(caplog, buffer_size=1)
    log.bench.enrol("a")
    counts = []
    for began, until in ((0, 60), (600, 660), (86_400, 86_700)):
        for half_s in range(2 * began, 2 * until):
            log.work("a", half_s / 2)
        counts.append(len(log.lines()))
    assert counts == [60, 6, 5]


def test_a_rollback_is_a_line_after_those_of_the_versions_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog, buffer_size=1)
    log.bench.enrol("a")
    for number in range(3):
        log.work("a", 1.0 + number / 100)
    log.lines()
    log.chronicle.hear(1.1, [RolledBackTo(4, 1, 2, 2), Unbarred("a")])
    assert log.lines() == [
        ("INFO", "versions 2 to 3: 2 updates, staleness 0.0 on average"),
        ("WARNING", "rolled back: version 4 leaves 2 updates of after version 1 out"),
        ("INFO", "a is out of quarantine"),
    ]


def test_another_phase_is_a_line_once_and_a_status_has_it(caplog: pytest.LogCaptureFixture) -> None:
    buffered = {"strategy": "fedbuff", "buffer_size": 1}
    phases = [{**buffered, "until_versions": 2}, {"strategy": "fedasync"}]
    log = Logged(caplog, "phased", phases=phases)
    log.bench.enrol("a")
    assert log.glance().phase == "phase 1 of 2, fedbuff"
    log.work("a", 1.0)
    log.work("a", 1.1)
    assert ("INFO", "phase 2 of 2, fedasync: begun by version 2") in log.lines()
    log.work("a", 1.2)
    assert log.lines() == []
    assert log.glance().phase == "phase 2 of 2, fedasync"
    assert Glances(Bench("fedasync").engine).take().phase == ""


def test_rejections_are_warnings_gathered_by_reason(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, buffer_size=9)
    log.bench.enrol("a", "b")
    log.work("a", 1.0, flaw="delta is not finite")
    assert log.fields() == {
        "count": 1,
        "clients": 1,
        "client": "a",
        "reason": "invalid",
        "detail": "delta is not finite",
    }
    assert log.lines() == [("WARNING", "1 update not taken (invalid) of a: delta is not finite")]
    for number in range(8):
        log.work("aab"[number % 3], 2.0 + number, flaw="again")
    assert log.lines() == []
    log.look(1.0 + GATHERED_S)
    assert log.lines() == [("WARNING", "8 updates not taken (invalid) of a (6), b (2): again")]


def test_a_device_that_was_only_late_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, "fedasync", staleness_max=1)
    log.bench.enrol("a", "b")
    log.ask("a", 0.0)
    for number in range(3):
        log.work("b", 1.0 + number / 10)
    log.look(3.0)
    log.lines()
    log.chronicle.hear(4.0, log.bench.push("a", "a0.0", now=4.0))
    ((level, text),) = log.lines()
    assert (level, text) == (
        "INFO",
        "1 update not taken (stale) of a: staleness 3 is over the bound of 1 versions",
    )


def test_leases_that_end_without_an_update_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, lease_s=20.0)
    log.bench.enrol(*"abcde")
    for client in "abcde":
        log.ask(client, 1.0)
    log.do(ev.Ticked(30.0))
    assert log.lines() == [("INFO", "5 leases expired without an update: a, b, c, 2 others")]


def test_a_device_that_takes_task_after_task_and_sends_nothing_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog)
    log.bench.enrol("a")
    for second in range(3):
        log.ask("a", float(second))
    log.look(12.0)
    assert log.lines() == [
        ("INFO", "1 lease superseded without an update: a"),
        ("INFO", "1 lease superseded without an update: a"),
    ]


def test_a_run_that_is_still_paused_says_so_at_a_start(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    log.do(ev.Paused(1.0))
    Chronicle(log.glance, 50.0)
    said = ("WARNING", "the run is paused, as it was: `anabranch admin resume` has it go on")
    assert log.lines() == [said]
    log.do(ev.Resumed(60.0))
    Chronicle(log.glance, 70.0)
    assert log.lines() == []


def test_a_training_that_diverged_is_a_warning_with_what_its_device_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog)
    log.bench.enrol("a")
    log.ask("a", 1.0)
    log.do(ev.TaskDropped(2.0, "a", "a1.0", "the loss is NaN", diverged=True))
    assert log.lines() == [("WARNING", "1 training diverged on a: the loss is NaN")]


def test_a_stall_says_what_is_waited_for_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, buffer_size=1, concurrency=1, lease_s=50.0, lease_min_s=50.0)
    log.bench.enrol("a", "b")
    log.work("a", 1.0)
    log.lines()
    for second in range(2, 400):
        if second == 2:
            log.ask("a", 2.0)
        if second % 20 == 0:
            log.ask("b", float(second))
        log.look(float(second))
        if second == 61:
            assert log.fields() | {"tasks": 1, "asking": 1, "seconds": 60} == log.fields()
    texts = [text for level, text in log.lines() if level == "WARNING" and text.startswith("no update")]
    assert texts[0] == (
        "no update for 60.0 s: 1 task open, that of a for 59.0 s; 1 device asking, b is told "
        "at_capacity: 1 of 1 devices are in training"
    )
    assert [text.split(":")[0] for text in texts[1:]] == ["no update for 2.00 min", "no update for 4.00 min"]


def test_a_stall_says_what_is_on_its_way_in(caplog: pytest.LogCaptureFixture) -> None:
    """An update of a model of 12 MB takes minutes over a slow link, and nothing hangs."""
    log = Logged(caplog, lease_s=50.0, lease_min_s=50.0)
    log.bench.enrol("a")
    log.ask("a", 1.0)
    log.lines()
    now = 2.0 * STALL_S
    assert log.chronicle.look(now)
    log.chronicle.stalled(Standing.of(log.bench.engine), now, Coming(1, 2_300_000, 12_000_000))
    ((level, text),) = log.lines()
    assert level == "WARNING"
    assert text.endswith("; 1 update on the way in, 2.30 MB of 12.0 MB came")


def test_a_long_task_is_no_stall_and_neither_is_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, lease_s=3000.0)
    log.bench.enrol("a")
    log.ask("a", 1.0)
    log.look(STALL_S * 10)
    assert log.lines() == []
    log = Logged(caplog, lease_s=10.0)
    log.bench.enrol("a")
    log.do(ev.Paused(2.0))
    log.ask("a", 3.0)
    log.look(STALL_S * 10)
    assert log.lines() == []


def test_a_device_that_asks_in_vain_for_long_is_named(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, concurrency=1, buffer_size=1)
    log.bench.enrol("a", "b")
    for second in range(1, 1000, 10):
        log.work("a", float(second))
        log.ask("a", second + 1.0)
        log.ask("b", second + 2.0)  # always too late
        log.look(second + 3.0)
        log.chronicle.hear(second + 4.0, log.bench.push("a", f"a{second + 1.0}", now=second + 4.0))
    starving = [text for level, text in log.lines() if level == "WARNING"]
    assert starving[0].startswith("1 device asking in vain for over 5.00 min, b for 5.02 min: at_capacity")
    assert len(starving) == 2, "after 5 and after 10 minutes"
    assert STARVING_S == 300.0


def test_the_end_has_the_totals(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, buffer_size=1, updates_max=2)
    log.bench.enrol("a")
    log.work("a", 1.0)
    log.work("a", 1.5, flaw="no")
    log.work("a", 1.7)
    *_, before, (level, text) = log.lines()
    assert before == ("INFO", "version 2: 1 update, staleness 0.0 on average"), "nothing is left unsaid"
    assert level == "INFO"
    assert text == (
        "end of the run after 2 versions of 2 updates (1 rejected, 0 leases lost, 1 device, "
        "1.70 s since this server started): the run ended after 2 updates, its budget"
    )
    log.look(10_000.0)
    assert log.lines() == []


def test_the_end_says_that_more_will_be_rejected_where_tasks_are_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So that whoever looks at the status later sees more than the line had."""
    log = Logged(caplog, buffer_size=1, updates_max=1)
    log.bench.enrol("a")
    log.bench.enrol("b")
    log.ask("b", 0.5)
    log.work("a", 1.0)
    assert (
        "(0 rejected, 0 leases lost, 1 task open, of which what comes is rejected, 2 devices, "
        in log.lines()[-1][1]
    )


def test_a_run_that_is_given_up_is_a_warning_and_a_restart_repeats_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog, buffer_size=1, rejections_max=2)
    log.bench.enrol("a")
    for second in (1.0, 2.0):
        log.work("a", second, flaw="not finite")
    assert log.fields()["given_up"] is True
    level, text = log.lines()[-1]
    assert level == "WARNING"
    assert text.endswith(
        "): the last 2 updates were all rejected (not finite): learning rate too large, or NaN in the data?"
    )
    Chronicle(log.glance, 50.0)
    ((level, text),) = log.lines()
    assert (level, text) == ("INFO", f"the run had ended before: {log.bench.engine.finished}")


def test_quarantine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    log.bench.enrol("a")
    log.do(ev.Quarantined(1.0, "a", "sends noise"))
    assert log.fields() == {"client": "a", "why": "sends noise"}
    assert log.lines() == [("WARNING", "a is in quarantine: sends noise")]


def test_a_masked_sum_that_is_given_up_is_said_with_what_is_lost_by_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = MaskedBench()
    bench.enrol("a", "b")
    chronicle = Chronicle(Glances(bench.engine).take, 0.0)
    for client in "ab":
        bench.give(client, f"{client}0", [1, 2, 3, 4])
    terms = bench.cohorts.terms
    lie = np.full(terms.size, 1 << 31, terms.ring.dtype)
    chronicle.hear(2.0, bench.do(mask_sum_arrived(terms, 2.0, 1, "north", lie)[0]))
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert line.getMessage() == (
        "masked sum 1 is given up, and its 2 updates with it: no honest updates have such a sum: one was out "
        "of bounds, or what a keeper answered is wrong"
    )
    assert vars(line)["fields"]["updates"] == 2


def test_a_write_that_hangs_is_told_at_once_then_more_rarely_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog)
    for lasted_s in (0.0, HANG_S - 1, 0.0, *range(100), 0.0, HANG_S / 2, HANG_S, 1.0):
        log.chronicle.hanging(float(lasted_s))
    said = log.lines()
    assert [text.partition(":")[0] for _, text in said] == [
        *(f"the log has taken nothing for {lasted}.0 s" for lasted in (10, 20, 40, 80)),
        "the log takes events again",
        "the log has taken nothing for 10.0 s",
        "the log takes events again",
    ]
    assert [level for level, _ in said] == [*["WARNING"] * 4, "INFO", "WARNING", "INFO"]
