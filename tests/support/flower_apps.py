"""Flower apps for tests, each a package of another name: Python keeps one of a name."""

from __future__ import annotations

import itertools
from pathlib import Path
from textwrap import dedent

_numbers = itertools.count()

# Moves its model towards the number of its partition, and counts in its state how often it was asked to.
COUNTING = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(msg, context):
        state = context.state.config_records.get("memory") or ConfigRecord({"tasks": 0})
        context.state["memory"] = state
        state["tasks"] += 1
        part, config = context.node_config["partition-id"], msg.content["config"]
        step = config["lr"] * (part + 1) * state["tasks"]
        arrays = {n: np.asarray(a.numpy() + step, a.dtype) for n, a in msg.content["arrays"].items()}
        context.state["last"] = ArrayRecord({n: Array(a) for n, a in arrays.items()})
        metrics = {"num-examples": 10 * (part + 1), "tasks": state["tasks"], "round": config["server-round"]}
        content = RecordDict({"arrays": context.state["last"], "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        part = context.node_config["partition-id"]
        mean = float(np.mean([a.numpy().mean() for a in msg.content["arrays"].values()]))
        metrics = {"num-examples": 10 * (part + 1), "eval_acc": 0.1 * part, "eval_loss": mean}
        metrics |= {"tasks": len(context.state), "round": msg.content["config"].get("server-round", -1)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
"""

FEDAVG = """
    import pathlib

    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid, context):
        first = {"layer.weight": Array(np.ones((2, 3), np.float32))}
        first["layer.bias"] = Array(np.zeros(3, np.float32))
        first["steps"] = Array(np.array(7))
        FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"]).start(
            grid=grid, initial_arrays=ArrayRecord(first), num_rounds=context.run_config["num-server-rounds"],
            train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
            evaluate_config=ConfigRecord({"how": "well"}),
        )
        pathlib.Path("finished.txt").write_text("a rehearsal must not come as far as this")
"""

# The older API: a list of arrays without names, the first of them fetched from a client.
NUMPY_CLIENT = """
    import numpy as np
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    class Client(NumPyClient):
        def __init__(self, part):
            self.part = part

        def get_parameters(self, config):
            return [np.full((2, 3), 5.0, np.float32), np.zeros(3, np.float32)]

        def fit(self, parameters, config):
            moved = [p + config["lr"] * (self.part + 1) for p in parameters]
            return moved, 10 * (self.part + 1), {"fit_loss": 0.5, "round": config["server_round"]}

        def evaluate(self, parameters, config):
            return float(np.mean(parameters[0])), 10 * (self.part + 1), {"accuracy": 0.1 * self.part}

    calls = []

    def seen(message, context, call_next):
        calls.append(message.metadata.message_type)
        return call_next(message, context)

    def client_fn(context):
        return Client(context.node_config["partition-id"]).to_client()

    app = ClientApp(client_fn, mods=[seen])
"""

LEGACY_SERVER = """
    from flwr.server import ServerAppComponents, ServerConfig
    from flwr.serverapp import ServerApp
    from flwr.server.strategy import FedAvg

    def server_fn(context):
        strategy = FedAvg(on_fit_config_fn=lambda round: {"lr": 0.5, "server_round": round})
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

    app = ServerApp(server_fn=server_fn)
"""

# Its ServerApp judges, too.
CENTRAL = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()
    played = []

    def judged(round, arrays):
        if round < 0:
            return None
        mean = float(np.mean([a.numpy().mean() for a in arrays.values()]))
        return MetricRecord({"central_loss": mean, "round": round, "all": [1.0, 2.0]})

    @app.main()
    def main(grid, context):
        played.append(context)
        FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"]).start(
            grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=3,
            train_config=ConfigRecord({"lr": 0.5}), evaluate_fn=judged,
        )
"""

TRAINS_ONLY = COUNTING[: COUNTING.index("    @app.evaluate()")]

LEGACY_CENTRAL = LEGACY_SERVER.replace(
    "FedAvg(",
    "FedAvg(fraction_evaluate=0.0, evaluate_fn=lambda r, a, c: (float(a[0].mean()), {'round': r}), ",
)


def write_app(folder: Path, client: str = COUNTING, server: str = FEDAVG, config: str = "") -> Path:
    """Write an app; its run config has learning-rate 0.5, 3 rounds, and whatever lines `config` adds."""
    name = f"app_{next(_numbers)}"
    root = folder / name
    package = root / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "client_app.py").write_text(dedent(client))
    (package / "server_app.py").write_text(dedent(server))
    (root / "pyproject.toml").write_text(
        dedent(f"""
        [project]
        name = "{name.replace("_", "-")}"
        version = "1.0.0"
        license = "Apache-2.0"
        dependencies = []

        [tool.flwr.app]
        publisher = "tests"

        [tool.flwr.app.components]
        serverapp = "{name}.server_app:app"
        clientapp = "{name}.client_app:app"

        [tool.flwr.app.config]
        num-server-rounds = 3
        fraction-evaluate = 1.0
        learning-rate = 0.5
        """)
        + config
    )
    return root
