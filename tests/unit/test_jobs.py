"""Jobs without a server: their names, whose they are, and which one a device has next."""

from __future__ import annotations

import pytest

from anabranch.client.jobs import AGAIN_MAX_S, AGAIN_S, Rota
from anabranch.client.listed import ListedJob
from anabranch.core.errors import ConfigError, NotPermitted
from anabranch.identity.addresses import checked_job, parse_addresses, split_job
from anabranch.server.gate import EVERYBODY, Scope


def job(name: str) -> ListedJob:
    return ListedJob(name, "running", "", "", 0, "app", ())


def test_an_address_may_name_a_job() -> None:
    assert split_job("10.0.0.1:7070") == ("10.0.0.1:7070", "")
    assert split_job("[::1]:7070/wards.2") == ("[::1]:7070", "wards.2")
    assert parse_addresses("a:1/x, b:2/x") == ["a:1/x", "b:2/x"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "-x", "a" * 65, "ü", "a b", "a\n"])
def test_what_is_no_name_of_a_job(name: str) -> None:
    with pytest.raises(ConfigError, match="job"):
        checked_job(name)
    with pytest.raises(ConfigError, match="job"):
        split_job(f"a:1/{name}")


def test_a_scope_is_of_patterns() -> None:
    scope = Scope(("ward-*", "lab"))
    assert [scope.has(name) for name in ("ward-1", "lab", "lab-1", "Ward-1")] == [True, True, False, False]
    assert EVERYBODY.has("anybody")
    with pytest.raises(NotPermitted, match="'lab-1' is not of this job"):
        scope.check("lab-1")


def test_a_device_takes_the_first_job_that_it_may_begin() -> None:
    now = [0.0]
    rota, jobs = Rota(lambda: now[0]), [job("a"), job("b")]

    def next_name() -> str:
        found = rota.next(jobs)
        return "" if found is None else found.name

    assert next_name() == "a"
    rota.done("a", 0, 15.0)  # it ended well, and is still listed: not at once again
    assert next_name() == "b"
    rota.done("b", 3, 15.0)
    assert next_name() == ""
    now[0] = 15.0
    assert next_name() == "a"
    rota.done("a", 1, 15.0)
    now[0] = AGAIN_S
    assert next_name() == "b"
    rota.done("b", 1, 15.0)  # for the second time: twice as long
    now[0] += 2 * AGAIN_S - 1
    assert next_name() == "a"
    rota.done("a", 0, 1000.0)
    now[0] += 1
    assert next_name() == "b"
    rota.done("b", 0, 15.0)  # well again: failures are forgotten
    rota.done("b", 1, 15.0)
    now[0] += AGAIN_S
    assert next_name() == "b"


def test_a_job_that_a_device_fails_at_for_days_is_tried_again() -> None:
    now = [0.0]
    rota, jobs = Rota(lambda: now[0]), [job("a")]
    for _ in range(1100):  # more than a float has doublings
        rota.done("a", 1, 15.0)
    now[0] = AGAIN_MAX_S - 1
    assert rota.next(jobs) is None
    now[0] = AGAIN_MAX_S
    assert rota.next(jobs) == jobs[0]
