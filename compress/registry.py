"""Codecs by their text, and the stages that this installation has.

    topk(0.1)|int8(256)|gaps|zstd      selection, values, indices, entropy coder: in this order
    int4(256,sr)|zstd                  no selection: all values
    deadzone(0.1)|gaps|huffman         selection and values in one
    mask(0.1)|int4                     the indices follow from a seed

A selection without a stage for values sends them as f32, one without a stage for indices sends u32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from anabranch.compress.chain import Chain
from anabranch.compress.codec import Codec, Raw
from anabranch.compress.deadzone import DeadZone
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.indices import Bitmap, Gaps, PlainIndices
from anabranch.compress.quantisers import BLOCKS, BFloat16, Float32, Int4, Int8
from anabranch.compress.selectors import Mask, Threshold, TopK, fraction, number
from anabranch.compress.stage import Stage
from anabranch.core.errors import UnknownCodec
from anabranch.core.model.chains import RAW, StageText, parse_chain

Arguments = tuple[str, ...]
STEP_WORD, RANDOM_WORD = "step", "sr"


def _whole(text: str, stage: str, allowed: range) -> int:
    if not text.isdecimal() or int(text) not in allowed:
        raise UnknownCodec(f"{stage}({text}): give a whole number from {allowed.start} to {allowed.stop - 1}")
    return int(text)


def _threshold(arguments: Arguments) -> Stage:
    rho, *every = arguments or ("",)
    return Threshold(fraction(rho, "threshold"), *(_whole(e, "threshold", range(1, 10_001)) for e in every))


def _integers(kind: type[Int4] | type[Int8]) -> Callable[[Arguments], Stage]:
    def make(arguments: Arguments) -> Stage:
        stochastic = arguments[-1:] == (RANDOM_WORD,)
        block = ",".join(arguments[: len(arguments) - stochastic]) or str(max(BLOCKS))
        if block not in map(str, BLOCKS):
            raise UnknownCodec(f"{kind.name}({block}): a block is of {BLOCKS} values; sr comes after it")
        return kind(int(block), stochastic)

    return make


def _deadzone(arguments: Arguments) -> Stage:
    if arguments[:1] != (STEP_WORD,):
        return DeadZone(fraction(",".join(arguments), "deadzone"))
    step = number(",".join(arguments[1:]))
    if not 1e-30 <= step <= 1e30:
        raise UnknownCodec(f"deadzone({','.join(arguments)}): the step is a number such as 0.001")
    return DeadZone(step=step)


def _zstd(arguments: Arguments) -> Stage:
    return Zstd(*(_whole(a, "zstd", range(1, 20)) for a in arguments))


# The kind, what makes one of its arguments, and the most arguments that it takes.
_STAGES: tuple[tuple[type[Stage], Callable[[Arguments], Stage], int], ...] = (
    (TopK, lambda a: TopK(fraction(a[0] if a else "", "topk")), 1),
    (Threshold, _threshold, 2),
    (Mask, lambda a: Mask(fraction(a[0] if a else "", "mask")), 1),
    (Float32, lambda _: Float32(), 0),
    (BFloat16, lambda _: BFloat16(), 0),
    (Int8, _integers(Int8), 2),
    (Int4, _integers(Int4), 2),
    (DeadZone, _deadzone, 2),
    (PlainIndices, lambda _: PlainIndices(), 0),
    (Gaps, lambda _: Gaps(), 0),
    (Bitmap, lambda _: Bitmap(), 0),
    (Zstd, _zstd, 1),
    (Huffman, lambda _: Huffman(), 0),
)
_BY_NAME = {kind.name: (make, most) for kind, make, most in _STAGES}

# What each place of a chain can have; a dead zone is a selection and a stage for values at once.
SELECTIONS, VALUES = ("topk", "threshold", "mask"), ("f32", "bf16", "int8", "int4", "deadzone")
INDICES, ENTROPY = ("u32", "gaps", "bitmap"), ("zstd", "huffman")
PLACES = (SELECTIONS, VALUES, INDICES, ENTROPY)

# What goes into `Capability.codecs`: every stage with its version; `ef` and `log` wrap chains.
STAGES: tuple[str, ...] = (
    f"{RAW}:1",
    *(f"{kind.name}:{kind.version}" for kind, _, _ in _STAGES),
    "ef:1",
    "log:1",
)
_NAMED = frozenset((*STAGES, *(stage.partition(":")[0] for stage in STAGES)))


def known_stages(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the stages that a device names, as `name:version` or `name`, which are here; each once."""
    return tuple(name for name in dict.fromkeys(names) if name in _NAMED)


@lru_cache(maxsize=256)
def make_codec(text: str) -> Codec:
    """The codec of its text. Raises `UnknownCodec`, naming the stage and the fix."""
    if text == RAW:
        return Raw()
    return Chain(text, tuple(_stage(stage, text) for stage in _completed(text)))


def _stage(stage: StageText, text: str) -> Stage:
    make, most = _BY_NAME[stage.name]
    if len(stage.arguments) > most:
        raise UnknownCodec(f"codec {text!r}: {stage.name} takes at most {most} arguments")
    return make(stage.arguments)


def _completed(text: str) -> list[StageText]:
    """The stages by their places, with those that go without saying: f32 for values, u32 for indices."""
    filled: dict[int, StageText] = {}
    for stage in parse_chain(text):
        place = next((i for i, names in enumerate(PLACES) if stage.name in names), None)
        if place is None:
            hint = "raw stands alone" if stage.name == RAW else f"known: raw, {', '.join(_BY_NAME)}"
            raise UnknownCodec(f"codec {text!r}: unknown stage {stage.name!r}; {hint}")
        if place in filled:
            raise UnknownCodec(f"codec {text!r}: one of {', '.join(PLACES[place])} is enough")
        if filled and place < max(filled):
            raise UnknownCodec(f"codec {text!r}: {stage.name} comes before {filled[max(filled)].name}")
        filled[place] = stage
    filled.setdefault(1, StageText("f32"))
    if filled[1].name == "deadzone" and 0 in filled:
        raise UnknownCodec(f"codec {text!r}: deadzone selects, leave {filled[0].name} out")
    chooser = filled.get(0, filled[1]).name
    if chooser in ("topk", "threshold", "deadzone"):
        filled.setdefault(2, StageText("u32"))
    elif 2 in filled:
        raise UnknownCodec(f"codec {text!r}: it has no indices to code, leave {filled[2].name} out")
    return [filled[place] for place in sorted(filled)]
