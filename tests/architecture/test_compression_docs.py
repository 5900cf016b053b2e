"""`docs/compression.md` says what the codecs do: stages, sizes of heads, roles, example chains."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from anabranch.compress import wire
from anabranch.compress.chain import Chain
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec, stages
from anabranch.compress.stage import Role
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Coordinates, Submodel, tensor_set, unit_map
from anabranch.core.model.units import Member, UnitGroup

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text(encoding="utf-8")
# One chain for each stage that has it.
CHAINS = (
    "topk(0.1)|int4|gaps|zstd",
    "threshold(0.1)|bf16|bitmap|huffman",
    "mask(0.1)|f32",
    "topk(0.1)|int8|u32",
    "deadzone(0.1)",
    "e3m0",
)
SPEC = ParamSpec.of(
    {"w": np.zeros((64, 64), np.float32), "b": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32)},
    [UnitGroup("rows", 4, (Member("w", 0, 2, 8),))],
    buffers=["mean"],
)


def test_the_table_of_stages() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    codecs = [make_codec(text) for text in CHAINS]
    made = {stage for codec in codecs if isinstance(codec, Chain) for stage in codec.stages}
    assert {(name, int(n), int(v)) for name, n, v in rows} == {(s.name, s.number, s.version) for s in made}
    announced = {f"{name}:{version}" for name, _, version in rows}
    assert announced == set(stages()) - {"raw:1", "ef:1", "momentum:1", "log:1", "logparts:1"}


def test_the_example_chains() -> None:
    block = PAGE.split("```")[1]
    for line in block.strip().splitlines():
        make_codec(line.split()[0])


def test_the_bytes() -> None:
    sizes = [wire.HEAD.size + wire.CRC.size, wire.GROUP.size, wire.STAGE.size, wire.STREAM.size]
    found = re.findall(r"(\d+) (?:bytes of head|for each)", PAGE)
    assert [int(size) for size in found] == sizes
    said = PAGE[PAGE.index("role: ") : PAGE.index("9 to 12")]
    assert {(int(n), name) for n, name in re.findall(r"(\d) (\w+)", said)} == {
        (role.value, role.name.lower()) for role in Role if role < Role.PLANE_0
    }


def streams_of(payload: bytes) -> list[tuple[list[int], set[int]]]:
    """The numbers of the stages and the roles of the streams of each group, where the page says they are."""
    at, found = 16, []
    for _ in range(payload[3]):
        _, n_stages, n_streams = payload[at : at + 3]
        heads = at + 11 + 2 * n_stages
        found.append((list(payload[at + 11 : heads : 2]), set(payload[heads : heads + 10 * n_streams : 10])))
        at = heads + 10 * n_streams
    return found


@pytest.mark.parametrize("text", CHAINS)
def test_the_streams_of_each_stage(text: str) -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([a-z].*) \|$", PAGE[PAGE.index("## The bytes") :], re.M)
    said = {name: what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    codec, x = make_codec(text), np.random.default_rng(0).normal(size=SPEC.size).astype(np.float32)
    assert isinstance(codec, Chain)
    main, small = streams_of(codec.encode(x, Layout.of(SPEC)))
    roles = {name: {r.value for r in Role if r.name.lower() in said[name].split(":")[0]} for name in said}
    assert main[1] == set().union(*(roles.get(stage.name, set()) for stage in codec.stages))
    assert main[0] == [stage.number for stage in codec.stages]
    assert small == ([10 if 10 in main[0] else 11], {Role.VALUES.value})


@pytest.mark.parametrize(
    ("part", "hashed"),
    [
        (None, b""),
        (Coordinates(np.array([1, 5])), struct.pack("<2q", 1, 5)),
        (unit_map(SPEC, [(0, 3)]), b'[[["rows", 4, [["w", 0, 2, 8]]]], {"kept": ["09"]}]'),
        (tensor_set(SPEC, (0, 2)), b'[[["rows", 4, [["w", 0, 2, 8]]]], {"tensors": ["05"]}]'),
    ],
)
def test_the_fingerprint_and_the_checksum(part: Submodel | None, hashed: bytes) -> None:
    layout = Layout.of(SPEC, part)
    payload = make_codec("int8").encode(np.ones(layout.size, np.float32), layout)
    digest = hashlib.sha256(json.dumps([[t.name, list(t.shape), t.dtype] for t in SPEC.tensors]).encode())
    printed = hashlib.blake2b(digest.digest() + hashed + b'["mean"]', digest_size=8).digest()
    tail = len(payload) - layout.tail_bytes
    assert payload[4:16] == printed + struct.pack("<I", zlib.crc32(payload[16:tail]))
