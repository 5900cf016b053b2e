"""Damaged and hostile payloads over real gRPC: each gets its error, the model stays, the server goes on.

What is wrong with a header is refused before a byte of the payload is taken, and leaves no trace. What is
wrong with a payload closes its task, so it is on record with its flaw; nothing is learned from it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from backports import zstd as zstandard
from learning import recorded
from wire import UNHELD, Served, server_config

from anabranch.compress import wire
from anabranch.compress.chain import Chain
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.layout import Layout
from anabranch.compress.registry import STAGES, make_codec
from anabranch.compress.selectors import kept_count
from anabranch.compress.stage import Coded, Role, Stream
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.testing.payloads import laplace, resealed

TENSORS: dict[str, Any] = {"w": np.ones((1000, 100), np.float32), "seen": np.asarray([7], np.int64)}
SPEC = ParamSpec.of(TENSORS)
LAYOUT = Layout.of(SPEC)
N = SPEC.size
K = kept_count(0.1, N)
CHAIN, HUFFMAN = "topk(0.1)|int8(64)|gaps|zstd", "topk(0.1)|int8(64)|gaps|huffman"
GOOD = make_codec(CHAIN).encode(laplace(N), LAYOUT)
MOST = make_codec(CHAIN).bytes_max(LAYOUT)
GROUP = wire.HEAD.size + wire.CRC.size  # where the head of the one group begins
STAGE = GROUP + wire.GROUP.size
ZEROS = bytes(1 << 23)


@dataclass(frozen=True)
class Bad:
    """What is sent, and what must come back. `recorded`: with its flaw in the log."""

    words: str
    data: bytes = GOOD
    status: str = "INVALID_ARGUMENT"
    error: str = "InvalidUpdate"
    header: dict[str, Any] = field(default_factory=dict)
    chain: str = CHAIN
    recorded: bool = False


@dataclass(frozen=True)
class Seen:
    """What came back; and the flaw in the log ("" for none), with whether anything was learned from it."""

    status: str
    error: str
    details: str
    flaw: str = ""
    learned: bool = False


def refused(words: str, status: str = "INVALID_ARGUMENT", error: str = "InvalidUpdate", **header: Any) -> Bad:
    """Good data with fields of its header changed."""
    return Bad(words, header.pop("data", GOOD), status, error, header)


def flawed(words: str, data: bytes, chain: str = CHAIN) -> Bad:
    """A good header with other data."""
    return Bad(words, data, chain=chain, recorded=True)


def patched(at: int, data: bytes) -> bytes:
    """The good payload with other bytes at a place, and a checksum that fits."""
    return resealed(GOOD[:at] + data + GOOD[at + len(data) :])


def streams(k: int = 2, chain: str = CHAIN, **changed: bytes | Stream) -> bytes:
    """A sealed payload of two values, 1 and 2, with other streams in the place of its own."""
    codec = make_codec(chain)
    assert isinstance(codec, Chain)
    own: dict[str, bytes | Stream] = {"codes": b"\x01\x02", "scales": b"\x80\x3f", "index": gaps(3, 9)}
    coded = Coded(k)
    for name, data in {**own, **changed}.items():
        coded.streams[Role[name.upper()]] = data if isinstance(data, Stream) else Stream.of(data)
    return wire.write([wire.WireGroup(codec.stages, coded)], LAYOUT)


def gaps(*indices: int) -> bytes:
    return loops.write_gaps(np.array(indices, np.int64))


def zstd(data: bytes, announced: int = K, *, sized: bool = True) -> Stream:
    options: dict[int, int] = {zstandard.CompressionParameter.content_size_flag: int(sized)}
    return Stream(zstandard.compress(data, options=options), announced, Zstd.number)


def lying() -> Stream:
    """A zstd frame of many zeros whose own head says that they are few."""
    frame = bytearray(zstd(ZEROS).data)
    at = frame.index(struct.pack("<I", len(ZEROS)))
    frame[at : at + 4] = struct.pack("<I", K)
    return Stream(bytes(frame), K, Zstd.number)


def deflated(data: bytes) -> Stream:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return Stream(coder.compress(data) + coder.flush(), K, Huffman.number)


BAD: dict[str, Bad] = {
    # The header: nothing of the payload is taken.
    "another chain than the task's": refused(f"of codec 'int8', the task asked for '{CHAIN}'", codec="int8"),
    "an unknown stage": refused("stage 'magic'", "UNIMPLEMENTED", "UnknownCodec", codec="magic(1)"),
    "a version in the text": refused("write stages as", "UNIMPLEMENTED", "UnknownCodec", codec="int8:2"),
    "a wrong order": refused("topk comes", "UNIMPLEMENTED", "UnknownCodec", codec="gaps|topk(0.1)"),
    "feedback in it": refused("stage 'ef'", "UNIMPLEMENTED", "UnknownCodec", codec=f"ef(0.9)|{CHAIN}"),
    "a long chain": refused("at most 200", "UNIMPLEMENTED", "UnknownCodec", codec="int8|" * 20_000),
    "a byte over the most": refused(
        f"needs at most {MOST} for {N} values", "OUT_OF_RANGE", "TooLarge", data=bytes(MOST + 1)
    ),
    "another manifest": refused(
        "enrol", "FAILED_PRECONDITION", "ManifestMismatch", manifest_sha256=bytes(32)
    ),
    # The upload: its task stays open.
    "more than announced": refused("over its declared", size_bytes=len(GOOD) - 1),
    "less than announced": refused(f"ended after {len(GOOD)}", size_bytes=len(GOOD) + 1),
    "another digest than announced": refused("another digest", sha256=bytes(32)),
    # Heads.
    "nothing": flawed("in the middle", b""),
    "half a head": flawed("in the middle", GOOD[:9]),
    "magic": flawed("not of format 1", b"XX" + GOOD[2:]),
    "format": flawed("not of format 1", GOOD[:2] + b"\x02" + GOOD[3:]),
    "layout": flawed("another layout", GOOD[:4] + bytes(8) + GOOD[12:]),
    "n": flawed(f"of {N + 1} values", patched(GROUP + 3, struct.pack("<I", N + 1))),
    "k over the kept fraction": flawed(f"at most {K}", patched(GROUP + 7, struct.pack("<I", K + 1))),
    "k over n": flawed(f"at most {K}", patched(GROUP + 7, b"\xff\xff\xff\xff")),
    "another stage": flawed("the codec says topk:1", patched(STAGE, b"\x02")),
    "a newer version of a stage": flawed("stage (1, 2)", patched(STAGE + 1, b"\x02")),
    "cut short": flawed("checksum", GOOD[:-5]),
    "cut short, the checksum mended": flawed("in the middle", resealed(GOOD[:-5])),
    "a flipped bit": flawed("checksum", GOOD[:-1] + bytes([GOOD[-1] ^ 1])),
    "a tail": flawed("goes on for 2 bytes", resealed(GOOD + b"xx")),
    # Bombs.
    "a frame of more than announced": flawed(
        f"of {len(ZEROS)} bytes was announced", streams(K, codes=zstd(ZEROS))
    ),
    "a frame of no size": flawed("was announced", streams(K, codes=zstd(ZEROS, sized=False))),
    "a frame that lies": flawed("damaged", streams(K, codes=lying())),
    "a stream that announces too much": flawed("more than", streams(K, codes=zstd(ZEROS, len(ZEROS)))),
    "a deflate bomb": flawed("more than", streams(K, HUFFMAN, codes=deflated(ZEROS)), HUFFMAN),
    # Values.
    "scales cut short": flawed("stream scales has 1", streams(scales=b"\x80")),
    "scales that are no numbers": flawed("finite", streams(scales=b"\xc1\x7f")),
    "infinite scales": flawed("finite", streams(scales=b"\x80\x7f")),
    "negative scales": flawed("finite", streams(scales=b"\x80\xbf")),
    "huge scales": flawed("over 1e+12", streams(scales=b"\x00\x60")),
    "codes out of range": flawed("-127..127", streams(codes=b"\x80\x00")),
    "an index over n": flawed(f"index {N} is over", streams(index=gaps(3, N))),
    "fewer indices": flawed("cannot be 2 indices", streams(index=gaps(3))),
    "a foreign stream": flawed("does not know: seed", streams(seed=bytes(8))),
}


def flaws(data_dir: Path) -> dict[str, tuple[str, bool]]:
    """The flawed updates of a log, each with whether the engine learned anything from it."""
    return {name: (r.flaw, r.learned) for name, r in recorded(data_dir).items() if r.flaw}


def sent(served: Served, rows: dict[str, Bad]) -> dict[str, Seen]:
    """Send everything that is bad to one server, a good update after each."""
    device, seen, numbers = served.device(codecs=STAGES), {}, iter(range(len(rows)))
    for name, bad in rows.items():
        fields = {"codec": bad.chain, **bad.header}
        try:
            device.send(device.task(), bad.data, f"bad-{next(numbers)}", **fields)
            seen[name] = Seen("OK", "", "it was taken")
        except grpc.RpcError as error:
            names = [str(m.value) for m in error.trailing_metadata() or () if m.key == "anabranch-error"]
            seen[name] = Seen(error.code().name, "".join(names), str(error.details()))
        answer = device.push(device.task(), laplace(N), codec=bad.chain)
        assert answer.decision.verdict == "published", f"the server does not go on after {name!r}"
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What became of every bad update: on the wire, in the log, in the engine."""
    found: dict[str, Seen] = {}
    for number, chain in enumerate((CHAIN, HUFFMAN)):
        folder = tmp_path_factory.mktemp(f"chain-{number}")
        tables = {"uplink": {"codec": f"ef(0.9)|{chain}"}, "downlink": {"codec": "log(1)"}}
        rows = {name: bad for name, bad in BAD.items() if bad.chain == chain}
        manifest = write_manifest(folder, "test", TENSORS)
        with Served(server_config(folder / "data", **tables), manifest, UNHELD) as served:
            answers = sent(served, rows)
        assert served.exit_code == 0
        assert verify(folder / "data").problems == ()
        in_log = flaws(folder / "data")
        for at, (name, answer) in enumerate(answers.items()):
            flaw, changed = in_log.pop(f"bad-{at}", ("", False))
            found[name] = Seen(answer.status, answer.error, answer.details, flaw, changed)
        assert not in_log
    return found


@pytest.mark.parametrize("name", BAD)
def test_a_bad_payload_is_refused_and_changes_nothing(name: str, seen: dict[str, Seen]) -> None:
    bad, found = BAD[name], seen[name]
    assert (found.status, found.error) == (bad.status, bad.error), found.details
    assert bad.words in found.details
    assert bool(found.flaw) == bad.recorded
    assert not found.learned


def test_the_same_payload_without_a_flaw_is_taken() -> None:
    for chain in (CHAIN, HUFFMAN):
        values = make_codec(chain).decode(streams(chain=chain), LAYOUT)
        assert isinstance(values, SparseVector)
        assert (values.indices.tolist(), values.values.tolist()) == ([3, 9], [1.0, 2.0])
