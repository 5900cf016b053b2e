"""quickstart-numpy: a Flower ClientApp."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_numpy.task import load_data
from quickstart_numpy.task import test as test_fn
from quickstart_numpy.task import train as train_fn

app = ClientApp()


def _partition(context: Context) -> tuple[int, int]:
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = {name: array.numpy().copy() for name, array in msg.content["arrays"].items()}
    x, _, y, _ = load_data(*_partition(context))
    loss = train_fn(
        model,
        x,
        y,
        int(context.run_config["local-epochs"]),
        float(msg.content["config"]["lr"]),
        int(context.run_config["batch-size"]),
    )
    arrays = ArrayRecord({name: Array(array) for name, array in model.items()})
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = {name: array.numpy() for name, array in msg.content["arrays"].items()}
    _, x, _, y = load_data(*_partition(context))
    loss, accuracy = test_fn(model, x, y)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
