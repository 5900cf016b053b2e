"""A script with a Trainer of Lightning's. joined_lightning.py is it in a federation."""

import lightning
import torch
from sklearn.datasets import load_digits


class Digits(lightning.LightningModule):
    """An MLP for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, as most take it."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Learn the digits."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    data = torch.utils.data.TensorDataset(x, torch.tensor(digits.target))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), loader)
    print(f"loss {trainer.callback_metrics['train_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
