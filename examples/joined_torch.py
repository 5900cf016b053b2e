"""plain_torch.py as a device of a federation: HOST:PORT is where its server is. See docs/python.md."""

import sys

import torch
from sklearn.datasets import load_digits

import anabranch


def make_model() -> torch.nn.Module:
    """An MLP for images of 8 x 8."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def main() -> None:
    """Learn the digits."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    federation = anabranch.join(sys.argv[1], model, id="script-0")
    for _ in federation:
        for rows in torch.randperm(len(x)).split(32):
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.3f}", flush=True)
        federation.push(examples=len(x), metrics={"loss": loss})


if __name__ == "__main__":
    main()
