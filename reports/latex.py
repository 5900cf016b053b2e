"""A comparison as a table of LaTeX: `booktabs`, a row for each kind of run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from anabranch.core.model.chains import AUTO
from anabranch.reports.against import Against
from anabranch.reports.equal import at_equal
from anabranch.reports.metrics import metric_text
from anabranch.reports.result import Result
from anabranch.reports.spreads import compare, spread_text
from anabranch.reports.text import NOTHING, bytes_text, duration_text

_SPECIAL = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "µ": r"$\mu$",
        NOTHING: "--",
        "\n": " ",
    }
)
_AT_TEXT: dict[Against, Callable[[float], str]] = {"time": duration_text, "bytes": bytes_text}


def comparison_latex(results: Iterable[Result]) -> str:
    """The table alone, for `table` and a caption of one's own around it; it needs the package `booktabs`."""
    runs = list(results)
    rows = compare(runs)
    many = len({r.workload for r in rows}) > 1
    columns = [
        ("strategy", [f"{r.label} on {r.workload}" if many else r.label for r in rows]),
        ("seeds", [str(len(r.seeds)) for r in rows]),
        ("metric", [NOTHING if r.metric == AUTO else r.metric for r in rows]),
        ("final", [spread_text(r.final_value, partial(metric_text, r.metric)) for r in rows]),
        *((_title(runs, against), _equal(runs, against)) for against in _AT_TEXT),
        ("time to target", [spread_text(r.time_to_target_s, duration_text) for r in rows]),
        ("uplink", [spread_text(r.uplink_bytes, bytes_text) for r in rows]),
        ("downlink", [spread_text(r.downlink_bytes, bytes_text) for r in rows]),
    ]
    told = [(head, cells) for head, cells in columns if any(cell != NOTHING for cell in cells)]
    lines = zip(*(cells for _, cells in told), strict=True)
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            f"\\begin{{tabular}}{{l{'r' * (len(told) - 1)}}}",
            "\\toprule",
            _line([head for head, _ in told]),
            "\\midrule",
            *(_line(line) for line in lines),
            "\\bottomrule",
            "\\end{tabular}\n",
        ]
    )


def escaped(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return text.translate(_SPECIAL)


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"


def _title(runs: Sequence[Result], against: Against) -> str:
    """How far all of them are in this column; of several workloads each has its own."""
    places = {row.at for row in at_equal(runs, against)}
    return f"after {_AT_TEXT[against](places.pop())}" if len(places) == 1 else f"at equal {against}"


def _equal(runs: Sequence[Result], against: Against) -> list[str]:
    return [spread_text(row.value, partial(metric_text, row.metric)) for row in at_equal(runs, against)]
