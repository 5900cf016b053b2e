"""Trains as many steps as it is told; with none it sends the model back."""

from __future__ import annotations

from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from peer.task import EXAMPLES, trained

app = ClientApp()


@app.train()
def train(message: Any, context: Any) -> Any:
    """Local training, or none."""
    arrays, steps = message.content["arrays"], message.content["config"]["steps"]
    if steps:
        arrays = trained(arrays, steps, context.node_config["partition-id"])
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": EXAMPLES})}
    return Message(content=RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Any, context: Any) -> Any:
    """No evaluation."""
    del context
    metrics = MetricRecord({"num-examples": EXAMPLES, "accuracy": 0.0, "loss": 0.0})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
