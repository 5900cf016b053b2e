"""plain_transformers.py as a device of a federation: HOST:PORT is where its server is."""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import anabranch


def make_model() -> Any:
    """A small vision transformer for images of 8 x 8, with random weights."""
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=10,
        )
    )


def main() -> None:
    """Learn the digits."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    data = [{"pixel_values": x, "labels": y} for x, y in zip(images, digits.target.tolist(), strict=True)]
    args = TrainingArguments(
        output_dir="trained",
        num_train_epochs=1,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(
        make_model(),
        args,
        train_dataset=data,
        callbacks=[anabranch.TransformersCallback(sys.argv[1], id="transformers-0")],
    )
    trainer.train()
    print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
