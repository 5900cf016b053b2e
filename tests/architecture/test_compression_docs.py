"""`docs/compression.md` says what the codecs do: stages, sizes of heads, roles, example chains."""

from __future__ import annotations

import re
from pathlib import Path

from anabranch.compress import wire
from anabranch.compress.chain import Chain
from anabranch.compress.registry import make_codec, stages
from anabranch.compress.stage import Role

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
