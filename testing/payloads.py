"""Models and deltas to encode, chains that cover every stage, and damaged payloads."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from anabranch.core.model.params import ParamSpec, Vector

# Every stage, every kind of argument, every form of values, indices and entropy coding.
CHAINS = (
    "f32",
    "bf16",
    "bf16|zstd",
    "int8",
    "int8(32,sr)|zstd",
    "int4|huffman",
    "int4(64,sr)",
    "e3m0(64)",
    "topk(0.25)|e3m0|gaps|zstd",
    "topk(0.1)",
    "topk(0.1)|int8(256)|gaps|zstd",
    "topk(0.25)|int4|bitmap|zstd(3)",
    "topk(0.01)|bf16|u32|zstd",
    "threshold(0.1)|int8(128)|gaps|huffman",
    "deadzone(0.1)|gaps|huffman",
    "deadzone(step,0.01)|bitmap|zstd",
    "mask(0.1)|int4",
    "mask(0.5)|f32|zstd",
)


def model(rows: int = 70, columns: int = 133, dtype: type = np.float32) -> ParamSpec:
    """Two matrices, between and after them what is small, and a counter; no size is a round number."""
    return ParamSpec.of(
        {
            "first.weight": np.zeros((rows, columns), dtype),
            "first.bias": np.zeros(rows, dtype),
            "seen": np.zeros((), np.int64),
            "second.weight": np.zeros((3, rows, 7), dtype),
            "second.bias": np.zeros(3, dtype),
        }
    )


def laplace(size: int, seed: int = 0, dtype: type = np.float32) -> Vector:
    """Values as those of a delta: few large, many small; neighbours of one scale."""
    draw = np.random.default_rng(seed)
    scales = np.repeat(np.exp(draw.normal(0, 1, -(-size // 100))), 100)[:size]
    return np.asarray(1e-3 * draw.laplace(size=size) * scales, dtype)


def resealed(payload: bytes) -> bytes:
    """With the checksum that the rest now has."""
    return payload[:12] + struct.pack("<I", zlib.crc32(payload[16:])) + payload[16:]


def damaged(payload: bytes, draw: np.random.Generator) -> bytes:
    """One to four changes of any kind, most of them in the heads; mostly with a checksum that fits."""
    data = bytearray(payload)
    for _ in range(int(draw.integers(1, 5))):
        reach = len(data) if draw.random() < 0.4 else min(len(data), 120)
        at, kind = int(draw.integers(0, max(1, reach))), draw.random()
        if kind < 0.45 and data:
            data[at] ^= 1 << int(draw.integers(8))
        elif kind < 0.65 and data:
            data[at] = int(draw.choice([0, 1, 127, 128, 254, 255]))
        elif kind < 0.8 and len(data) >= at + 4:
            data[at : at + 4] = int(draw.choice([0, 1, 2**31 - 1, 2**32 - 1, at])).to_bytes(4, "little")
        elif kind < 0.9:
            del data[at : at + int(draw.integers(1, 40))]
        else:
            data[at:at] = draw.bytes(int(draw.integers(1, 40)))
    return resealed(bytes(data)) if draw.random() < 0.85 and len(data) >= 16 else bytes(data)
