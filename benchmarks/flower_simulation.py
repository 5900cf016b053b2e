"""Flower's simulation of devices that train nothing (`flower_echo/`), for comparison.

    python flower_simulation.py DEVICES ROUNDS

Every round each device gets the model and sends it back. Prints JSON: the seconds of each round after the
first, in which Ray starts. Imports nothing of anabranch.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def main(devices: int, rounds: int) -> None:
    """Simulate, and print."""
    sys.path.insert(0, str(Path(__file__).with_name("flower_echo")))
    client, model = import_module("echo.client_app").app, import_module("echo.server_app").model
    from flwr.app import Message, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server = ServerApp()

    def serve(grid: Any, context: Any) -> None:
        """Every round takes all devices, which Flower's own strategies do not do in their first."""
        del context
        while len(nodes := list(grid.get_node_ids())) < devices:
            time.sleep(0.1)
        arrays = model()
        seconds = []
        for number in range(rounds + 1):
            started = time.perf_counter()
            content = RecordDict({"arrays": arrays})
            messages = [
                Message(content=content, message_type="train", dst_node_id=n, group_id=str(number))
                for n in nodes
            ]
            waiting = set(grid.push_messages(messages))
            while waiting:
                replies = list(grid.pull_messages(waiting))
                waiting -= {reply.metadata.reply_to_message_id for reply in replies}
                time.sleep(0.0 if replies else 0.01)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"round_s": seconds[1:]}), flush=True)

    server.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=devices, backend_config=resources)


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:3]))
