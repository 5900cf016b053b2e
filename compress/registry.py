"""Codecs by their text, and the stages that this installation has.

    topk(0.1)|int8(256)|gaps|zstd      selection, values, indices, entropy coder: in this order
    int4(256,sr)|zstd                  no selection: all values
    deadzone(0.1)|gaps|huffman         selection and values in one
    mask(0.1)|int4                     the indices follow from a seed

A selection without a stage for values sends them as f32, one without a stage for indices sends u32. Two are
no chains, and stand alone: `raw`, and `ring(32,20)` of masked updates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any, get_type_hints

from anabranch.compress.chain import Chain
from anabranch.compress.codec import Codec, Raw
from anabranch.compress.deadzone import DeadZone
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.indices import Bitmap, Gaps, PlainIndices
from anabranch.compress.quantisers import BLOCKS, E3M0, BFloat16, BlockIntegers, Float32, Int4, Int8
from anabranch.compress.ring import RingNumbers
from anabranch.compress.selectors import Mask, Threshold, TopK, fraction, number
from anabranch.compress.stage import OTHERS, Stage
from anabranch.core.errors import ConfigError, UnknownCodec
from anabranch.core.model.chains import FEEDBACK, MOMENTUM, RAW, STEP_WORD, StageText, parse_chain
from anabranch.core.parts import PartKind, check_is_data, members
from anabranch.core.rules import NEWEST
from anabranch.core.secagg.ring import RING

Arguments = tuple[str, ...]
RANDOM_WORD = "sr"


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
        said = arguments[: len(arguments) - stochastic]
        return kind(_block(said, kind.name, "; sr comes after it"), stochastic)

    return make


def _e3m0(arguments: Arguments) -> Stage:
    return E3M0(_block(arguments, E3M0.name))


def _block(arguments: Arguments, stage: str, more: str = "") -> int:
    block = ",".join(arguments) or str(max(BLOCKS))
    if block not in map(str, BLOCKS):
        raise UnknownCodec(f"{stage}({block}): a block is of {BLOCKS} values{more}")
    return int(block)


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
    (E3M0, _e3m0, 1),
    (DeadZone, _deadzone, 2),
    (PlainIndices, lambda _: PlainIndices(), 0),
    (Gaps, lambda _: Gaps(), 0),
    (Bitmap, lambda _: Bitmap(), 0),
    (Zstd, _zstd, 1),
    (Huffman, lambda _: Huffman(), 0),
)
_BY_NAME = {kind.name: (make, most) for kind, make, most in _STAGES}

# What each place of a chain can have; a dead zone is a selection and a stage for values at once.
PLACE_NAMES = ("selection", "values", "indices", "entropy")
SELECTIONS, VALUES = ("topk", "threshold", "mask"), ("f32", "bf16", "int8", "int4", "e3m0", "deadzone")
INDICES, ENTROPY = ("u32", "gaps", "bitmap"), ("zstd", "huffman")
PLACES = (SELECTIONS, VALUES, INDICES, ENTROPY)

# What goes into `Capability.codecs`: every stage with its version; `ef`, `momentum` and `log` wrap chains,
# `logparts` says that parts of the log can be sent. `LATER` than the first release, see `simulated_stages`.
LATER: tuple[str, ...] = (f"{E3M0.name}:{E3M0.version}", "logparts:1", f"{MOMENTUM}:1")
STAGES: tuple[str, ...] = (
    f"{RAW}:1",
    *(name for kind, _, _ in _STAGES if (name := f"{kind.name}:{kind.version}") not in LATER),
    "ef:1",
    "log:1",
)
# What a device says besides that masks for keepers, and no other: without keepers `ring` is of no use.
MASKING = f"{RING}:1"
# And that its boxes say what it was trained from, and that it takes no other plan than the terms'.
BOUND_MASKING = f"{RING}:2"
_ALONE = (RAW, RING)
_SPOKEN_FOR = (*_ALONE, FEEDBACK, MOMENTUM, "log", "logparts")


def _check(found: Any) -> None:
    """A stage of others: what `_of_others` and the wire need of it. Raises `ConfigError`."""
    check_is_data(found, "a codec stage is a dataclass of its arguments")
    if found.place not in PLACE_NAMES:
        raise ConfigError(f"place must be one of {', '.join(PLACE_NAMES)}, not {found.place!r}")
    if not re.fullmatch("[a-z][a-z0-9]*", found.name) or found.name in _SPOKEN_FOR:
        raise ConfigError(f"a codec stage's name is of small letters and digits, not {found.name!r}")
    if found.number not in OTHERS or not 0 < found.version < 256:
        raise ConfigError(
            f"number must be from {OTHERS.start} to {OTHERS.stop - 1} and version from 1 to 255, "
            f"not {found.number!r} and {found.version!r}: the numbers below are those of the built-in stages"
        )


CODEC_STAGES = PartKind(
    "codec stage",
    "stages",
    ("uplink.stages",),
    {kind.name: kind for kind, _, _ in _STAGES},
    (*members(Stage), "place"),
    _check,
    option="--part stage=PATH",
)


def others() -> dict[str, Any]:
    """The stages of others by name: installed ones that can be loaded, and those let in.

    Raises `ConfigError` where two of them have one number: asked for at the start of whatever runs.
    """
    found, taken = CODEC_STAGES.others(), dict[int, str]()
    for name, stage in found.items():
        if (other := taken.setdefault(stage.number, name)) != name:
            raise ConfigError(
                f"the codec stages {other!r} and {name!r} have one number on the wire, {stage.number}: "
                f"give one of them another, from {OTHERS.start} to {OTHERS.stop - 1}"
            )
    return found


def stages() -> tuple[str, ...]:
    """What goes into `Capability.codecs` here: `STAGES`, `LATER`, those of others with their versions."""
    return _with((*LATER, *(f"{s.name}:{s.version}" for s in others().values())))


def simulated_stages(chain: str) -> tuple[str, ...]:
    """What a simulated device says: later stages only where the run's chain has them.

    What it says is in the log, and the same simulation has the same log in every release.
    """
    words = set(re.findall("[a-z][a-z0-9]*", chain))
    later = tuple(name for name in LATER if name.partition(":")[0] in words)
    return _with((*later, *(f"{s.name}:{s.version}" for s in others().values())))


@lru_cache(maxsize=2)
def _with(more: tuple[str, ...]) -> tuple[str, ...]:
    return *STAGES, *more  # one tuple for a million simulated devices


def known_stages(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the stages that a device names, as `name:version` or `name`, which are here; each once."""
    here = (*stages(), MASKING, BOUND_MASKING)
    named = {*here, *(stage.partition(":")[0] for stage in here)}
    return tuple(name for name in dict.fromkeys(names) if name in named)


@lru_cache(maxsize=256)
def make_codec(text: str, rules: int = NEWEST) -> Codec:
    """The codec of its text. Raises `UnknownCodec`, naming the stage and the fix.

    By other `rules` (`core/rules.py`) it encodes otherwise; what it decodes is the same.
    """
    if text == RAW:
        return Raw()
    first, *rest = parse_chain(text)
    if first.name == RING and not rest:
        return _ring(first, text)
    return Chain(text, tuple(_by(_stage(stage, text), rules) for stage in _completed(text)))


@contextmanager
def codec_of(setting: str, text: str) -> Iterator[None]:
    """Inside, what is wrong with a codec's text is an error of the setting that has it: a `ConfigError`."""
    try:
        yield
    except UnknownCodec as error:
        raise ConfigError(f"{setting} = {text!r}: {str(error).removeprefix(f'codec {text!r}: ')}") from error


def _ring(stage: StageText, text: str) -> RingNumbers:
    bits = [int(word) for word in stage.arguments if word.isdecimal()]
    if len(bits) != 2 or len(stage.arguments) != 2:
        raise UnknownCodec(f"codec {text!r}: write the bits of a number and of a value, as in ring(32,20)")
    return RingNumbers(*bits)


def _stage(stage: StageText, text: str) -> Stage:
    make, most = _BY_NAME.get(stage.name) or _of_others(others()[stage.name], text)
    if len(stage.arguments) > most:
        raise UnknownCodec(f"codec {text!r}: too many arguments for {stage.name}, at most {most}")
    return make(stage.arguments)


def _by(stage: Stage, rules: int) -> Stage:
    """A stage that encodes by the rules of a run."""
    if isinstance(stage, BlockIntegers) and rules != NEWEST:
        return type(stage)(stage.block, stage.stochastic, rules)
    return stage


def _of_others(cls: Any, text: str) -> tuple[Callable[[Arguments], Stage], int]:
    """What makes a stage of others of its arguments: its fields in their order, each a number or a word."""
    hints = get_type_hints(cls)
    takes = [(f.name, hints[f.name]) for f in fields(cls) if f.init]

    def make(arguments: Arguments) -> Stage:
        try:
            given = {name: kind(text) for (name, kind), text in zip(takes, arguments, strict=False)}
            made: Stage = cls(**given)
        except (TypeError, ValueError) as error:
            raise UnknownCodec(f"codec {text!r}: {cls.name}({','.join(arguments)}): {error}") from error
        return made

    return make, len(takes)


def _places() -> dict[str, int]:
    """The place of every stage in a chain."""
    built_in = {name: i for i, names in enumerate(PLACES) for name in names}
    return built_in | {name: PLACE_NAMES.index(stage.place) for name, stage in others().items()}


def _say_why_not(name: str, text: str) -> None:
    """Raises `UnknownCodec` where a stage of others is installed and cannot be had."""
    try:
        CODEC_STAGES.find(name)
    except ConfigError as error:
        raise UnknownCodec(f"codec {text!r}: {error}") from error


def _has_indices(name: str) -> bool:
    """Whether what a stage has chosen travels with its indices; those of a mask follow from a seed."""
    if name in _BY_NAME:
        return name in ("topk", "threshold", "deadzone")
    stage = others()[name]
    return bool(stage.place == PLACE_NAMES[0] and not getattr(stage, "seeded", False))


def _completed(text: str) -> list[StageText]:
    """The stages by their places, with those that go without saying: f32 for values, u32 for indices."""
    filled: dict[int, StageText] = {}
    places = _places()
    for stage in parse_chain(text):
        place = places.get(stage.name)
        if place is None:
            if stage.name in CODEC_STAGES.names():
                _say_why_not(stage.name, text)
            known = f"known: raw, {', '.join(places)}; your own is in uplink.stages (a device's: --part)"
            hint = f"{stage.name} stands alone" if stage.name in _ALONE else known
            raise UnknownCodec(f"codec {text!r}: unknown stage {stage.name!r}; {hint}")
        if place in filled:
            same = [name for name, at in places.items() if at == place]
            raise UnknownCodec(f"codec {text!r}: one of {', '.join(same)} is enough")
        if filled and place < max(filled):
            raise UnknownCodec(f"codec {text!r}: {stage.name} comes before {filled[max(filled)].name}")
        filled[place] = stage
    filled.setdefault(1, StageText("f32"))
    if filled[1].name == "deadzone" and 0 in filled:
        raise UnknownCodec(f"codec {text!r}: deadzone selects, leave {filled[0].name} out")
    if _has_indices(filled.get(0, filled[1]).name):
        filled.setdefault(2, StageText("u32"))
    elif 2 in filled:
        raise UnknownCodec(f"codec {text!r}: it has no indices to code, leave {filled[2].name} out")
    return [filled[place] for place in sorted(filled)]
