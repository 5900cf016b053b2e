"""Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images of 28 x 28, ten classes.

The files are read from where Debian's package puts them, or from `[run] data_path`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import urllib.request
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.core.errors import DataError
from anabranch.workloads.app import App, Array, Examples, Shard
from anabranch.workloads.idx import VALUES_BYTES_MAX, read_idx
from anabranch.workloads.splits import take

DEFAULT_PATH = "/usr/share/datasets/fashion-mnist"
OFFICIAL_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# SHA-256 of each file unzipped: Debian's package zips the same contents anew.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
MEAN, DEVIATION = 0.2860, 0.3530  # of the training pixels, from 0 to 1
DOWNLOAD_TIMEOUT_S = 60.0


class FashionMnist(App):
    """A CNN of 99,806 parameters, sized so that a step takes about a millisecond and a half on one core."""

    name = "fashion-mnist"

    def model(self) -> Any:
        """Two convolutions and two dense layers; no normalisation, so every parameter can be averaged."""
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 60),
            nn.ReLU(),
            nn.Linear(60, 10),
        )

    def data(self, shard: Shard) -> Examples:
        """`x` float32 (count, 1, 28, 28) normalised, `y` int64. Raises `DataError` without the files."""
        if shard.role == "test":
            part = read_pair(self.data_path or DEFAULT_PATH, "t10k")
        else:
            part = take(read_pair(self.data_path or DEFAULT_PATH, "train"), shard)
        return Examples(_normalised(part.x), part.y)


@lru_cache(maxsize=4)
def read_pair(path: str, part: str) -> Examples:
    """The raw images (uint8, a quarter of the floats' memory) and labels of `train` or `t10k`.

    Read once in a process. Raises `DataError` when a file is absent or malformed.
    """
    images = read_idx(_file(path, f"{part}-images-idx3-ubyte"), 3)
    labels = read_idx(_file(path, f"{part}-labels-idx1-ubyte"), 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{path}: the {part} images are {images.shape[1]} x {images.shape[2]}, not 28 x 28")
    if labels.size and labels.max() > 9:
        raise DataError(f"{path}: the {part} labels go up to {labels.max()}, not 9")
    return Examples(images, labels.astype(np.int64))


def download(to: str | Path, url: str = OFFICIAL_URL) -> Path:
    """Fetch the four files (31 MB) into the folder `to`, each only when its contents match `SHA256`.

    Returns the folder, for `data_path`. Raises `DataError`; a file is there whole or not at all.
    """
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in SHA256.items():
        target = folder / f"{name}.gz"
        if target.exists() and _unzipped_sha256(target.read_bytes()) == expected:
            continue
        raw = _fetch(f"{url}/{name}.gz")
        if (found := _unzipped_sha256(raw)) != expected:
            raise DataError(f"{url}/{name}.gz: its contents have SHA-256 {found}, not {expected}")
        partial = folder / f"{name}.gz.part"
        partial.write_bytes(raw)
        os.replace(partial, target)
    return folder


def _fetch(url: str) -> bytes:
    # The contents are checked against SHA256, so the scheme need not be trusted.
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:  # noqa: S310
            body: bytes = response.read(VALUES_BYTES_MAX)
    except OSError as error:
        raise DataError(f"{url}: it cannot be fetched: {error}") from error
    return body


def _unzipped_sha256(raw: bytes) -> str:
    try:
        return hashlib.sha256(gzip.decompress(raw)).hexdigest()
    except (OSError, EOFError, zlib.error):
        return "none (not a whole gzip file)"


def _file(folder: str, name: str) -> Path:
    for candidate in (Path(folder) / f"{name}.gz", Path(folder) / name):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"Fashion-MNIST: there is no {name}.gz in {folder}: apt-get install dataset-fashion-mnist, "
        "or set data_path in [run] to a folder with the four IDX files"
    )


def _normalised(images: Array) -> Array:
    pixels = images[:, np.newaxis].astype(np.float32)
    pixels *= np.float32(1.0 / (255.0 * DEVIATION))
    pixels -= np.float32(MEAN / DEVIATION)
    return pixels
