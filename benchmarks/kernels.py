"""The compiled loops beside numpy's, on one core: what each takes of the time of a copy of the same values.

    python -m benchmarks.kernels

Every loop runs on 100,000 values and on ten million, of a normal distribution; its indices are those of the
hundredth part that is largest. Least times of a thread's processor, the two of a pair one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from anabranch.core.kernels import plain
from anabranch.core.kernels.contract import BlockForm, Bytes, Code, Halves, Loops
from anabranch.core.model.arrays import Vector
from benchmarks.codecs import least_s

SIZES = (100_000, 10_000_000)
CHUNK = 1 << 17  # values at a time, as the stages have it
SHARE = 0.01
CODES = {Code.INT8: 127, Code.INT4: 7, Code.E3M0: 1}  # the largest of each
ONCE = 2_000_000  # values that are gone through between two looks at the clock, in as many turns as it takes


@dataclass(frozen=True)
class Pair:
    """One loop: the times of numpy's and of the compiled one, over that of a copy."""

    name: str
    plain: float
    compiled: float


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def _part(chunk: slice, length: Callable[[int], int]) -> slice:
    return slice(length(chunk.start), length(chunk.stop))


Coded = list[tuple[slice, Bytes, Halves]]  # of each chunk


def _encode(loops: Loops, form: BlockForm, x: Vector, chunks: Coded) -> None:
    for own, codes, scales in chunks:
        loops.encode_blocks(x[own], form, codes, scales)


def _decode(loops: Loops, form: BlockForm, out: Vector, chunks: Coded) -> None:
    for own, codes, scales in chunks:
        loops.decode_blocks(codes, scales, form, out[own])


def _to_bf16(loops: Loops, x: Vector, halves: Halves) -> None:
    for own in _chunks(x.size):
        loops.to_bf16(x[own], halves[own])


def _works(loops: Loops, x: Vector) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each loop over all of x, chunk after chunk."""
    n, out = x.size, np.zeros_like(x)
    room, kept = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.float32)
    least = int(np.quantile(np.abs(x), 1 - SHARE).astype(np.float32).view(np.int32))
    yield "largest magnitude", lambda: [loops.top(x[c]) for c in _chunks(n)]
    yield "the largest hundredth", lambda: [loops.over(x[c], least, room, kept) for c in _chunks(n)]
    for code, top in CODES.items():
        form = BlockForm(code, 256, top)
        codes, scales = np.zeros(form.packed_len(n), np.uint8), np.zeros(form.scales(n), "<u2")
        own = [(c, codes[_part(c, form.packed_len)], scales[_part(c, form.scales)]) for c in _chunks(n)]
        yield f"{code.name.lower()}, encode", partial(_encode, loops, form, x, own)
        yield f"{code.name.lower()}, decode", partial(_decode, loops, form, out, own)
    halves = np.zeros(n, "<u2")
    yield "bf16, encode", partial(_to_bf16, loops, x, halves)
    yield "bf16, decode", lambda: [loops.from_bf16(halves[c], out[c]) for c in _chunks(n)]
    places = np.flatnonzero(np.abs(x).view(np.int32) >= least)
    values, gaps = x[places], plain.write_gaps(places)
    yield "gaps, write", lambda: loops.write_gaps(places)
    yield "gaps, read", lambda: loops.read_gaps(gaps, places.size, n)
    data = x.view(np.uint8)
    yield "CRC-32", lambda: loops.crc32(data.data)
    yield "add all", lambda: loops.add_dense(out, 0.5, x)
    yield "add the largest hundredth", lambda: loops.add_sparse(out, 0.5, places, values)


def measure(n: int) -> list[Pair]:
    """Every loop on n values."""
    from anabranch.core.kernels import compiled  # only here: without a compiler there is none

    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    target, turns = np.empty_like(x), max(1, ONCE // n)

    def took_s(work: Callable[[], object]) -> float:
        return least_s(lambda: [work() for _ in range(turns)])

    found = []
    for (name, slow), (_, fast) in zip(_works(plain, x), _works(compiled, x), strict=True):
        copy_s = took_s(lambda: np.copyto(target, x))
        found.append(Pair(name, took_s(slow) / copy_s, took_s(fast) / copy_s))
    return found


def section() -> str:
    """The page's."""
    pairs = {n: measure(n) for n in SIZES}
    small, large = (pairs[n] for n in SIZES)
    lines = [
        f"| {a.name} | {a.plain:.1f} | {a.compiled:.1f} | **{a.plain / a.compiled:.1f}** |"
        f" {b.plain:.2f} | {b.compiled:.2f} | **{b.plain / b.compiled:.1f}** |"
        for a, b in zip(small, large, strict=True)
    ]
    return f"""## Compiled loops

The loops that codecs and fold are made of, by numpy and compiled (`core/kernels/loops.c`), to the same bits.
Times in copies of the same values in the same run, on one core; 100,000 values lie in the cache, ten
million do not.

| loop | 100,000: numpy | compiled | numpy / compiled | 10,000,000: numpy | compiled | numpy / compiled |
{"|---" * 7}|
{chr(10).join(lines)}
"""


def main() -> None:
    """Measure and print."""
    print(section())


if __name__ == "__main__":
    main()
