"""A device that cannot make gradients, live: it hears how it trains, and its server is killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import anabranch
from outages import counted, outage
from safetensors.numpy import load_file

import anabranch as ab
from anabranch.core.errors import OUTCOMES, AppError
from anabranch.support.code import load

LONG_S = 600.0
UPDATES = 6
APPS = """
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace


def asked(gradient):
    raise AssertionError("a gradient was made")


class Forward(Digits):
    def settings(self, seed):
        return {"client": {"gradient": "zeroth", "steps": 20, "learning_rate": 0.1}}

    def model(self):
        net = super().model()
        for parameter in net.parameters():
            parameter.register_hook(asked)
        return net


class Numbers(Subspace):
    def __init__(self):
        super().__init__(Forward(), dimension=32)


class Own(Forward):
    def train(self, model, examples, plan, seed):
        raise AssertionError("it is not called")
"""


def test_a_device_trains_without_gradients_and_its_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "apps.py").write_text(APPS)
    numbers: Any = load(f"{tmp_path / 'apps.py'}:Numbers")
    began: list[Callable[[], None]] = []

    class Device(numbers):  # type: ignore[misc]
        name = "device"

        def train(self, *given: Any) -> Any:
            raise AssertionError("that of gradients is not called")

        def train_zeroth(self, *given: Any) -> Any:
            while began:
                began.pop()()
            return super().train_zeroth(*given)

    with outage(tmp_path, "apps.py:Numbers", UPDATES) as server:
        began.append(server.kill)
        options: Any = {"id": "a", "shard": (0, 1), "state_dir": tmp_path / "a"}
        with ab.Client(Device(), server.address, **options) as device:
            device.wait(LONG_S)
    assert counted(tmp_path) == {"a": UPDATES}
    assert not began
    assert load_file(tmp_path / "run" / "final.safetensors")["numbers"].any()


def test_an_app_without_a_loss_to_call_ends_the_device_with_why(tmp_path: Path) -> None:
    (tmp_path / "apps.py").write_text(APPS)
    done = anabranch(tmp_path, "check", "apps.py:Own", "--set", "client.gradient=zeroth")
    assert done.returncode == OUTCOMES[AppError].exit_code
    assert "client.gradient = 'zeroth' has no loss to call: Own has a train of its own" in done.stdout
    fine = anabranch(tmp_path, "check", "apps.py:Numbers", "--set", "client.gradient=zeroth")
    assert fine.returncode == 0, fine.stdout + fine.stderr
