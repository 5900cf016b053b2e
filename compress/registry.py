"""Codecs by their text, and the stages that this installation has.

    topk(0.1)|int8(256)|gaps|zstd      selection, values, indices, entropy
    int4(256,sr)|zstd                  no selection: all values
    deadzone(0.1)|gaps|huffman         selection and values in one
    mask(0.1)|int4                     the indices follow from a seed

A selection without a stage for values sends them as f32, one without a stage for indices sends u32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from anabranch.compress.chain import Chain
from anabranch.compress.codec import Codec, Raw
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.indices import Bitmap, Gaps, PlainIndices
from anabranch.compress.quantisers import BLOCKS, BFloat16, DeadZone, Float32, Int4, Int8
from anabranch.compress.selectors import Mask, Threshold, TopK, fraction
from anabranch.compress.stage import Stage
from anabranch.core.chains import RAW, StageText, parse_chain
from anabranch.core.errors import UnknownCodec

Arguments = tuple[str, ...]


def _number(text: str, stage: str, allowed: range) -> int:
    if not text.isdigit() or int(text) not in allowed:
        raise UnknownCodec(
            f"{stage}({text}): give a whole number from {allowed.start} to {allowed.stop - 1}, or none"
        )
    return int(text)


def _threshold(arguments: Arguments) -> Stage:
    rho, *every = arguments or ("",)
    return Threshold(fraction(rho, "threshold"), *(_number(e, "threshold", range(1, 10_001)) for e in every))


def _integers(kind: type[Int4] | type[Int8]) -> Callable[[Arguments], Stage]:
    def make(arguments: Arguments) -> Stage:
        blocks = [a for a in arguments if a != "sr"]
        if any(b not in map(str, BLOCKS) for b in blocks) or len(blocks) > 1:
            raise UnknownCodec(f"{kind.name}({','.join(arguments)}): a block is of {BLOCKS} values")
        return kind(int(blocks[0]) if blocks else 256, "sr" in arguments)

    return make


def _zstd(arguments: Arguments) -> Stage:
    return Zstd(*(_number(a, "zstd", range(1, 20)) for a in arguments))


# name: (how to make it, the most arguments it takes)
_MAKERS: dict[str, tuple[Callable[[Arguments], Stage], int]] = {
    "topk": (lambda a: TopK(fraction(a[0] if a else "", "topk")), 1),
    "threshold": (_threshold, 2),
    "mask": (lambda a: Mask(fraction(a[0] if a else "", "mask")), 1),
    "f32": (lambda _: Float32(), 0),
    "bf16": (lambda _: BFloat16(), 0),
    "int8": (_integers(Int8), 2),
    "int4": (_integers(Int4), 2),
    "deadzone": (lambda a: DeadZone(fraction(a[0] if a else "", "deadzone")), 1),
    "u32": (lambda _: PlainIndices(), 0),
    "gaps": (lambda _: Gaps(), 0),
    "bitmap": (lambda _: Bitmap(), 0),
    "zstd": (_zstd, 1),
    "huffman": (lambda _: Huffman(), 0),
}
SELECTS, WITHOUT_INDICES = ("topk", "threshold", "mask", "deadzone"), ("mask",)
VALUES, INDICES = ("f32", "bf16", "int8", "int4", "deadzone"), ("u32", "gaps", "bitmap")

# What goes into `Capability.codecs`: every stage with its version; `ef` and `log` wrap chains.
STAGES: tuple[str, ...] = (f"{RAW}:1", *(f"{name}:1" for name in _MAKERS), "ef:1", "log:1")


@lru_cache(maxsize=256)
def make_codec(text: str) -> Codec:
    """The codec of its text. Raises `UnknownCodec`, naming the stage and the fix."""
    if text == RAW:
        return Raw()
    return Chain(text, tuple(_stage(stage, text) for stage in _completed(text)))


def _stage(stage: StageText, text: str) -> Stage:
    if stage.name not in _MAKERS:
        raise UnknownCodec(
            f"unknown codec stage: {stage.name!r} in {text!r}; known: raw, {', '.join(_MAKERS)}"
        )
    make, most = _MAKERS[stage.name]
    if len(stage.arguments) > most:
        raise UnknownCodec(f"{stage.name} in {text!r} takes at most {most} arguments")
    return make(stage.arguments)


def _completed(text: str) -> list[StageText]:
    """The stages with those that go without saying: f32 for values, u32 for indices."""
    stages = list(parse_chain(text))
    names = [stage.name for stage in stages]
    for kinds in (SELECTS, VALUES, INDICES, ("zstd", "huffman")):
        if sum(name in kinds for name in names) > 1:
            raise UnknownCodec(f"codec {text!r}: one of {', '.join(kinds)} is enough")
    selects = any(name in SELECTS for name in names)
    if not any(name in VALUES for name in names):
        stages.insert(1 if selects else 0, StageText("f32"))
        names.insert(1 if selects else 0, "f32")
    indexed = selects and not any(name in WITHOUT_INDICES for name in names)
    if indexed and not any(name in INDICES for name in names):
        at = next(i for i, name in enumerate(names) if name in VALUES)
        stages.insert(at + 1, StageText("u32"))
    if not indexed and any(name in INDICES for name in names):
        raise UnknownCodec(f"codec {text!r}: there are no indices to code, leave that stage out")
    return stages
