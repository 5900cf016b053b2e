"""One thread for torch, and a small Fashion-MNIST whose classes can be told apart."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.core.rng import stream


def idx_bytes(array: np.ndarray) -> bytes:
    """An unsigned-byte array as an IDX file."""
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small models: a second thread only adds noise to the tests' time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fashion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four IDX files: noise with a bright row pair that tells the class."""
    folder = tmp_path_factory.mktemp("fashion")
    draws = stream(0, "images")
    for part, count in (("train", 600), ("t10k", 100)):
        labels = np.arange(count) % 10
        images = draws.integers(0, 60, (count, 28, 28))
        for i, label in enumerate(labels):
            images[i, 2 * label + 4 : 2 * label + 6] += 180
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder
