"""What compression saved, and how it changed over the versions of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.core.errors import UnknownCodec
from anabranch.core.model.chains import RAW, StageText, parse_chain, payload_codec
from anabranch.reports.page import card, table
from anabranch.reports.result import CompressionStep, Result
from anabranch.reports.scales import Axis, AxisScale
from anabranch.reports.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    XY,
    frame,
    hue,
    legend,
    path,
    svg,
    text,
)
from anabranch.reports.text import NOTHING, PERCENT, bytes_text, count_text, duration_text, number_text, safe

VERSIONS, KEPT = Axis("version", whole=True), Axis("values that travel", PERCENT, log=True)
SELECTIONS = ("topk", "threshold", "mask")
BITS = {"e3m0": 4, "int4": 4, "int8": 8, "bf16": 16, "f32": 32}
OTHERS = ("u32", "gaps", "bitmap", "zstd", "huffman")  # these change neither
STEPS_SHOWN_MAX = 12


@dataclass(frozen=True)
class ReportedStrength:
    """`kept`: the fraction of values that travel; `bits`: of each of them."""

    kept: float
    bits: int


def compression_cards(r: Result) -> list[str]:
    """What was saved, and a picture where the compression changed; none where nothing was compressed."""
    up = saving(r.uplink_bytes, r.uplink_bytes_raw)
    down = saving(r.downlink_bytes, r.downlink_bytes_full_equivalent)
    return [_bytes_card(r), *_steps_cards(r)] if up or down else []


def saving(sent: int, whole: int) -> str:
    """`12.3x fewer`, of bytes; empty where there is nothing to tell."""
    return f"{number_text(whole / sent)}x fewer" if 0 < sent < whole else ""


def strength_of(codec: str) -> ReportedStrength | None:
    """How much of each value a codec lets through; None where the text does not say."""
    if codec == RAW:
        return ReportedStrength(1.0, 32)
    try:
        stages = parse_chain(payload_codec(codec))
    except UnknownCodec:
        return None
    kept, bits = 1.0, 32
    for stage in stages:
        if stage.name in SELECTIONS:
            kept = _fraction(stage)
        elif stage.name in BITS:
            bits = BITS[stage.name]
        elif stage.name not in OTHERS:
            return None
    return ReportedStrength(kept, bits) if 0 < kept <= 1 else None


def _fraction(stage: StageText) -> float:
    try:
        return float(stage.arguments[0])
    except (IndexError, ValueError):
        return 0.0


def _bytes_card(r: Result) -> str:
    rows = [
        _bytes_row("uplink", r.uplink_bytes, r.uplink_bytes_raw),
        _bytes_row("downlink", r.downlink_bytes, r.downlink_bytes_full_equivalent),
    ]
    figures = table(("", "sent", "uncompressed", "saved"), rows)
    steps = _steps_table(r.compression) if r.compression else ""
    if len(r.compression) > STEPS_SHOWN_MAX:
        steps = f"<details><summary>All {len(r.compression)} decisions</summary>{steps}</details>"
    caption = (
        "Uncompressed are the same updates as they are, and the whole model for each download. A device "
        "that holds the version already downloads nothing; that is not counted as saved. A task of a "
        "sub-model sends that part alone, and the uncompressed update is that part."
    )
    return card("Compression", figures + steps, caption)


def _bytes_row(name: str, sent: int, whole: int) -> tuple[str, ...]:
    return name, bytes_text(sent), bytes_text(whole) if whole else NOTHING, saving(sent, whole) or NOTHING


def _steps_table(steps: Sequence[CompressionStep]) -> str:
    rows = [
        (
            count_text(s.version),
            duration_text(s.time_s),
            f"<code>{safe(s.uplink)}</code>",
            f"<code>{safe(s.downlink)}</code>",
            safe(s.why),
        )
        for s in steps
    ]
    return table(("from version", "at", "uplink", "downlink", "why"), rows)


def _steps_cards(r: Result) -> list[str]:
    ways: tuple[tuple[str, int, Callable[[CompressionStep], str]], ...] = (
        ("uplink", 0, lambda s: s.uplink),
        ("downlink", 1, lambda s: s.downlink),
    )
    found = [(n, c, [(s.version, strength_of(of(s))) for s in r.compression]) for n, c, of in ways]
    lines = [
        (n, c, [(v, s) for v, s in points if s is not None])
        for n, c, points in found
        if len({s for _, s in points}) > 1
    ]
    if not lines:
        return []
    caption = "The fraction of the values that travel, and the bits of each of them, by version."
    return [card("Compression over versions", steps_chart(lines, r.versions), caption)]


# Its name, its colour, and from which version on.
Line = tuple[str, int, Sequence[tuple[int, ReportedStrength]]]


def steps_chart(lines: Sequence[Line], last: int) -> str:
    """The kept fraction as steps, each with its bits. Every line has a step at least."""
    key, top = legend([(name, colour) for name, colour, _ in lines] if len(lines) > 1 else [])
    height = HEIGHT + top - TOP
    end = float(max([last, *(version for *_, steps in lines for version, _ in steps)]))
    xs = VERSIONS.scale([0.0, end], LEFT, WIDTH - RIGHT, snug=True)
    ys = KEPT.scale([s.kept for *_, steps in lines for _, s in steps], height - BOTTOM, top)
    parts = [*frame(VERSIONS, KEPT, xs, ys, height), *key]
    for line in lines:
        parts += _step_line(line, last, xs, ys)
    return svg(parts, height, "compression over versions")


def _step_line(line: Line, last: int, xs: AxisScale, ys: AxisScale) -> list[str]:
    name, colour, steps = line
    corners: list[XY] = []
    dots, labels, bits = [], [], 0
    for version, strength in steps:
        x, y = xs(version), ys(strength.kept)
        corners += [(x, corners[-1][1])] if corners else []
        corners.append((x, y))
        shown = f"{strength.bits} bits"
        tip = safe(f"{name} from version {version}: {100 * strength.kept:g} % of the values, {shown}")
        dots.append(f'<circle class="dot {hue(colour)}" cx="{x:.1f}" cy="{y:.1f}" r="3" data-tip="{tip}"/>')
        if strength.bits != bits:
            side = "tick end" if x > WIDTH / 2 else "tick"
            labels.append(text(x, y - 7, shown, side))
        bits = strength.bits
    corners.append((xs(max(last, steps[-1][0])), corners[-1][1]))
    return [f'<path class="line {hue(colour)}" d="{path(corners)}"/>', *dots, *labels]
