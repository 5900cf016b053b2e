"""Flower's simulation of `flower_app/`, for comparison: in a process of its own.

    python benchmarks/flower_simulation.py DEVICES ROUNDS STEPS fedavg|bare

Every round each device has one task. `fedavg`: as a user would have it, with Flower's strategy. `bare`: a
loop over the Grid that adds nothing up and hardly waits, the most that the engine under it can do. Prints
JSON: the seconds of each round after the first, in which Ray starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("flower_app")
FEDAVG, BARE = "fedavg", "bare"
LIMIT_S = 3_600.0  # a round of 10,000 devices takes some minutes


def rounds_s(devices: int, rounds: int, steps: int, how: str) -> list[float]:
    """The seconds of rounds; none where it does not come to an end, which is said."""
    command = [sys.executable, __file__, str(devices), str(rounds), str(steps), how]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **quiet, "FLWR_HOME": home, "PYTHONPATH": str(FOLDER)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"Flower with {devices} devices: {error}", file=sys.stderr)
            return []
    found = json.loads(next(t for t in done.stdout.splitlines() if t.startswith("{")))["round_s"]
    return [float(second) for second in found]


def main(devices: int, rounds: int, steps: int, how: str) -> None:
    """Simulate, and print."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        del context
        while len(list(grid.get_node_ids())) < devices:
            time.sleep(0.1)
        times = (_strategy if how == FEDAVG else _bare)(grid, devices, rounds + 1, steps)
        seconds = [later - sooner for sooner, later in pairwise(times)]
        print(json.dumps({"round_s": seconds[1:]}), flush=True)

    client = import_module("peer.client_app").app
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=devices, backend_config=resources)


def _strategy(grid: Any, devices: int, rounds: int, steps: int) -> list[float]:
    """When each round began, and the end."""
    from flwr.app import ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    times = []

    class Timed(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            times.append(time.perf_counter())
            return super().configure_train(*arguments)

    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=devices)
    first, told = import_module("peer.task").first_model(steps), ConfigRecord({"steps": steps})
    strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds, train_config=told)
    return [*times, time.perf_counter()]


def _bare(grid: Any, devices: int, rounds: int, steps: int) -> list[float]:  # noqa: ARG001 - as `_strategy`
    """The same, of a loop without a strategy."""
    from flwr.app import ConfigRecord, Message, RecordDict

    arrays, times = import_module("peer.task").first_model(steps), []
    for number in range(rounds):
        times.append(time.perf_counter())
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"steps": steps})})
        messages = [
            Message(content=content, message_type="train", dst_node_id=node, group_id=str(number))
            for node in grid.get_node_ids()
        ]
        waiting = set(grid.push_messages(messages))
        while waiting:
            replies = list(grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            time.sleep(0.0 if replies else 0.01)
    return [*times, time.perf_counter()]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
