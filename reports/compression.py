"""What travelled compressed: the codecs over versions, drawn and listed, and what they saved."""

from __future__ import annotations

from anabranch.core.chains import parse_chain
from anabranch.core.errors import UnknownCodec
from anabranch.reports.charts import Series, line_chart
from anabranch.reports.page import card, table
from anabranch.reports.result import CompressionStep, Result
from anabranch.reports.scales import Axis
from anabranch.reports.svg import XY
from anabranch.reports.text import bytes_text, count_text, duration_text, number_text, safe

SELECTS = ("topk", "threshold", "deadzone", "mask")
BITS = {"raw": 32.0, "f32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.0}


def compression_card(result: Result) -> str:
    """The steps as a table, and as a picture where there are several; nothing for a run that has none."""
    steps = result.compression
    if not steps or all(s.uplink == s.downlink == "raw" for s in steps):
        return ""
    rows = (
        (
            count_text(s.version),
            duration_text(s.time_s),
            f"<code>{safe(s.uplink)}</code>",
            f"<code>{safe(s.downlink)}</code>",
            safe(s.why),
        )
        for s in steps
    )
    listed = table(("from version", "at", "uplink", "downlink", "why"), rows)
    return card("Compression", _picture(result) + listed, _saved(result))


def less(used: int, full: int) -> str:
    """`54 times less than raw`, or nothing where nothing was saved."""
    return f"{number_text(full / used, 3)} times less than raw" if 0 < used < full else ""


def _saved(r: Result) -> str:
    up = f"Uplink {bytes_text(r.uplink_bytes)} for {bytes_text(r.uplink_bytes_raw)} of raw updates"
    full = bytes_text(r.downlink_bytes_full_equivalent)
    return f"{up}; downlink {bytes_text(r.downlink_bytes)} for {full} of whole raw models."


def _picture(r: Result) -> str:
    """Bits that travel for each of the model's values, without indices, over versions."""
    levels = [nominal_bits(s.uplink) for s in r.compression]
    if len(levels) < 2 or None in levels:
        return ""
    points = _steps(r.compression, [b for b in levels if b is not None], r.versions)
    bits = Axis("uplink bits a value, without indices")
    return line_chart([Series("uplink", points)], Axis("version", whole=True), bits)


def _steps(steps: tuple[CompressionStep, ...], levels: list[float], last: int) -> list[XY]:
    points: list[XY] = []
    ends = [*(float(s.version) for s in steps[1:]), float(max(last, steps[-1].version))]
    for step, level, end in zip(steps, levels, ends, strict=True):
        points += [(float(step.version), level), (end, level)]
    return points


def nominal_bits(chain: str) -> float | None:
    """Kept fraction times bits of a value; None for chains whose bits are not fixed."""
    kept, bits = 1.0, 32.0
    try:
        stages = parse_chain(chain)
    except UnknownCodec:
        return None
    for stage in stages:
        if stage.name in SELECTS and stage.arguments:
            kept = float(stage.arguments[0])
        if stage.name == "deadzone":
            return None
        bits = BITS.get(stage.name, bits)
    return kept * bits
