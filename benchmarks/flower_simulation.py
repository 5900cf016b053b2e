"""Flower's simulation of devices that train nothing, for comparison: run by the Python that has flwr.

    python flower_simulation.py DEVICES ROUNDS PARAMETERS

Every round each device gets the model and sends it back. Prints JSON: the seconds of each round after the
first, in which Ray starts. Imports nothing of anabranch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(devices: int, rounds: int, parameters: int) -> None:
    """Simulate, and print."""
    import numpy as np
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    def train(message: Any, context: Any) -> Any:
        del context
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(content=RecordDict(content), reply_to=message)

    def serve(grid: Any, context: Any) -> None:
        del context
        while len(nodes := list(grid.get_node_ids())) < devices:
            time.sleep(0.1)
        part = parameters // 4
        model = ArrayRecord([np.zeros(part, np.float32) for _ in range(4)])
        seconds = []
        for number in range(rounds + 1):
            started = time.perf_counter()
            content = RecordDict({"arrays": model})
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

    client.train()(train)
    server.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=devices, backend_config=resources)


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:4]))
