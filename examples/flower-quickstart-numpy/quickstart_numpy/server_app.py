"""quickstart-numpy: a Flower ServerApp."""

from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart_numpy.task import new_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    arrays = ArrayRecord({name: Array(array) for name, array in new_model().items()})
    strategy = FedAvg(fraction_evaluate=float(context.run_config["fraction-evaluate"]))
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": float(context.run_config["learning-rate"])}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print(f"final metrics: {result.evaluate_metrics_clientapp}")
