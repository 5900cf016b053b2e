"""Models with norms that keep running statistics, on devices that start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from safetensors.torch import load_file
from torch import nn

from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.testing.federation import config
from anabranch.workloads.digits import Digits
from anabranch.workloads.trainer import trainer_for


class Normed(Digits):
    """64-16-10 with a norm, whose state has a number: how many batches it saw."""

    name = "normed"

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


APP = f"{__file__}:Normed"


@pytest.mark.parametrize("downlink", ["raw", "log(1)"])
def test_a_device_with_norms_starts_again(downlink: str, tmp_path: Path) -> None:
    """At each start it has the version that it is to train from, or what leads there from it."""
    tables: dict[str, Any] = {
        "strategy": {"name": "fedbuff", "buffer_size": 2},
        "downlink": {"codec": downlink},
        "run": {"name": "norms", "workload": "normed"},
    }
    with live_server(tmp_path, trainer_for(Normed()).initial(0), config(**tables)) as info:
        for _ in range(5):
            done = run_client(ClientOptions(APP, info.address, "a", (0, 4), tmp_path / "a", tasks_max=1))
            assert (done.answered, done.failures) == (1, 0)
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
            operator.export(tmp_path / "model.safetensors")
    assert (status.updates_applied, status.version) == (5, 2)
    Normed().model().load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
