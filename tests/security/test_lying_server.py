"""A server of masked sums that does not keep to the protocol: real processes of it, a keeper and devices."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from commands import anabranch
from masked_fleet import MaskedFleet


def test_no_sum_shows_the_one_device_that_was_given_the_model_as_it_is(tmp_path: Path) -> None:
    """What all others learn of a model of zeros the server knows: with their sum it would have that one's."""
    with ExitStack() as stack:
        fleet = MaskedFleet(tmp_path, stack, devices=3, keepers=1, versions=6)
        fleet.keeper(0)
        fleet.lying("device-0")
        for number in range(3):
            fleet.device(number)
        # Which version is the first that devices of one sum have had from both depends on who is quick.
        while not (trouble := fleet.until("waiting", 1)["masked_sums"]["keepers"][0]["trouble"]):
            pass
        assert re.fullmatch(r"sum \d: other_model: version [1-5] was not the same model .*", trouble)
        assert fleet.status()["version"] < 6


def test_an_operator_cannot_have_one_device_train_by_another_plan(tmp_path: Path) -> None:
    """Neither while the server runs, nor by starting it again: who has trained already is in the next sum."""
    with ExitStack() as stack:
        fleet = MaskedFleet(tmp_path, stack, devices=3, keepers=1, versions=1)
        fleet.keeper(0)
        server, first = fleet.server(), fleet.device(0)
        fleet.until("updates_applied", 1)
        operator = ("--admin", fleet.admin, "--identity", "alice")
        done = anabranch(tmp_path, "admin", "set", "client.learning_rate=1e-30", *operator)
        assert (done.returncode, "sealed under the plan" in done.stderr) == (2, True), done.stderr
        server.terminate()
        assert server.wait(600) == 0
        for setting in ("client.learning_rate=1e-30", "client.gradient=zeroth"):
            done = anabranch(tmp_path, "server", "run.toml", "--model", "model", "--set", setting)
            assert (done.returncode, "sealed under the plan" in done.stderr) == (2, True), done.stderr
        fleet.server()
        devices = [first, *(fleet.device(number) for number in (1, 2))]
        assert [device.wait(600) for device in devices] == [0, 0, 0]
        assert fleet.status()["version"] == 1
