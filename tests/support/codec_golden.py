"""Payloads that must decode for ever: what was encoded, and by which chains.

    python tests/support/codec_golden.py       writes those that are not there yet, and changes none

A new version of a stage gets a new file beside the old one, whose bytes and digest stay.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import ParamSpec, Vector, dense, digest

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"
DIGESTS = FOLDER / "decoded.json"
SEED = 20_260_101
SPEC = ParamSpec.of(
    {
        "a.weight": np.zeros((41, 103), np.float32),
        "a.bias": np.zeros(17, np.float32),
        "b.weight": np.zeros((2, 2100), np.float32),
    }
)
LAYOUT = Layout.of(SPEC)

FILES = {
    "f32-1": "f32",
    "bf16-1": "bf16",
    "int8-1": "int8(256)",
    "int8-1-sr": "int8(32,sr)",
    "int4-1": "int4(64)",
    "int4-1-sr": "int4(128,sr)",
    "e3m0-1": "e3m0(64)",
    "topk-1-u32-1": "topk(0.05)|f32|u32",
    "gaps-1": "topk(0.003)|bf16|gaps",
    "bitmap-1": "topk(0.4)|int8|bitmap",
    "threshold-1": "threshold(0.1)|int8|gaps",
    "mask-1": "mask(0.2)|int4(256)",
    "deadzone-1": "deadzone(0.1)|gaps",
    "deadzone-1-step": "deadzone(step,0.00001)|bitmap",
    "zstd-1": "topk(0.1)|int8(256)|gaps|zstd",
    "zstd-1-level-19": "topk(0.25)|int4(256)|bitmap|zstd(19)",
    "huffman-1": "deadzone(0.2)|gaps|huffman",
}


def vector() -> Vector:
    """Exact fractions from integers alone, so that every machine has the same bits.

    x_i = s_i (h_i / 2^31 - 1) 2^-(8 + i / 512 mod 7), with h_i = 2654435761 i mod 2^32 and s_i = 8 for every
    31st i, else 1; the first of them are a zero, the smallest number, and negative ones.
    """
    i = np.arange(SPEC.size, dtype=np.uint64)
    hashed = (i * np.uint64(2654435761)) % np.uint64(1 << 32)
    spread = hashed.astype(np.float64) / 2.0**31 - 1.0
    scale = np.ldexp(np.where(i % np.uint64(31) == 0, 8.0, 1.0), -(8 + (i // np.uint64(512)) % 7).astype(int))
    x = np.asarray(spread * scale, np.float32)
    x[:4] = [0.0, 2.0**-149, -(2.0**-126), -0.75]
    return x


def main() -> None:
    """Write what is missing."""
    digests = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}
    digests.setdefault("input", digest(vector()))
    for name, text in FILES.items():
        file = FOLDER / f"{name}.bin"
        if not file.exists():
            codec = make_codec(text)
            file.write_bytes(codec.encode(vector(), LAYOUT, SEED))
            digests[name] = digest(dense(codec.decode(file.read_bytes(), LAYOUT)))
    DIGESTS.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
