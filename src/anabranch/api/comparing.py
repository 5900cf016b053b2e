"""`compare`: runs side by side, those that differ in nothing but the seed as one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anabranch.api.figures import Figure, curves
from anabranch.api.records import Records
from anabranch.api.run import Run
from anabranch.core.config.tables import NO_KEY
from anabranch.core.errors import ConfigError, DataError
from anabranch.reports.compare import Against, compare_html
from anabranch.reports.equal import at_equal
from anabranch.reports.folders import FRESH_RUNS
from anabranch.reports.latex import comparison_latex
from anabranch.reports.pairs import Difference, paired
from anabranch.reports.result import RESULT_FILE, Result
from anabranch.reports.spreads import Spread, SpreadRow
from anabranch.reports.spreads import compare as spreads_of
from anabranch.strategies.registry import STRATEGIES

BY_METRIC = {"metrics": "final", "worst_tenths": "worst_tenth", "deviations": "deviation"}  # columns of a row


@dataclass(frozen=True)
class Comparison:
    """Runs that have ended; `left_out` says, in a line each, which of those that were given are not in it."""

    results: Sequence[Result] = field(repr=False)
    left_out: Sequence[str] = ()

    @cached_property
    def spreads(self) -> list[SpreadRow]:
        """A row for each kind of run: every figure with its mean, deviation, least and greatest."""
        return spreads_of(self.results)

    @cached_property
    def rows(self) -> Records:
        """The same, flat: `final_accuracy` is a mean over the seeds, `final_accuracy_std` its deviation."""
        return Records(map(_flat, self.spreads))

    def plot(self, metric: str = "", against: Against = "time") -> Figure:
        """A metric, or else what the runs are judged by, over `time`, `updates` or `bytes`.

        The line is the mean over the seeds, the band from the least to the greatest. Raises `DataError`
        for runs of several workloads.
        """
        return curves(self.results, against, metric)

    def equal(self, against: Against = "time", at: float | None = None) -> Records:
        """What each kind of run had come to after so many seconds, updates or bytes, `at`: a row each.

        Without `at` they are those of the run that came least far, so that all were as far; a run that had
        ended by then is as it ended. Raises `DataError` for another measure, or an `at` that is no number.
        """
        return Records(
            {
                "workload": row.workload,
                "label": row.label,
                against: row.at,
                **_columns(row.metric, row.value),
            }
            for row in at_equal(self.results, against, at)
        )

    def paired(self, base: str = "") -> Records:
        """Each kind of run against one, a label or a strategy, else the first, from the seeds that both have.

        `final_accuracy`, or what else is measured first, is how much more it came to in the mean, and
        `final_accuracy_low` and `_high` are the ends of Student's interval of 95 %; so is `time_to_target_s`,
        of kinds of which every run has reached it. Raises `DataError` for a base that is no kind of run.
        """
        return Records(
            {
                "workload": row.workload,
                "label": row.label,
                "base": row.base,
                **_ends(f"final_{row.metric}", row.final_value),
                **_ends("time_to_target_s", row.time_to_target_s),
            }
            for row in paired(self.results, base)
        )

    def save(self, path: str | Path) -> Path:
        """Write what the name ends with.

        A page that opens offline (.html), `rows` (.csv), a table of LaTeX (.tex), or the figure of what
        counts (.svg, .png). Raises `ConfigError` for another kind of file.
        """
        where = Path(path)
        match where.suffix:
            case ".html":
                where.write_text(compare_html(self.results), encoding="utf-8")
            case ".csv":
                self.rows.to_csv(where)
            case ".tex":
                where.write_text(comparison_latex(self.results), encoding="utf-8")
            case ".svg" | ".png":
                self.plot().save(where)
            case _:
                raise ConfigError(f"{where}: end the name with .html, .csv, .tex, .svg or .png")
        return where

    def _repr_html_(self) -> str:
        return f"{self.rows._repr_html_()}{self.plot()._repr_html_()}"


def compare(runs: Iterable[Run | Result | str | Path] | Run | Result | str | Path) -> Comparison:
    """Put runs side by side: `Run`s, their folders, or results; or look at one alone.

    A folder that has folders of runs, such as a sweep's, stands for those; a tuning's for its runs from fresh
    seeds. What is no run, was interrupted, or is the same run again to the bit, is left out. Raises
    `DataError` where nothing remains, and for what is neither a run nor a folder.
    """
    found: dict[tuple[str, str], str] = {}
    results, left_out = [], []
    listed = runs if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    given = [found for run in listed for found in _each(run)]
    for run in given:
        name = (
            str(getattr(run, "folder", run)) if not isinstance(run, Result) else f"{run.strategy}, {run.seed}"
        )
        try:
            result = _result_of(run)
        except DataError as error:
            if len(given) == 1:
                raise
            left_out.append(str(error))
            continue
        digests = result.journal_sha256, result.model_sha256
        if result.status != "finished":
            left_out.append(f"{name} was interrupted ({result.why})")
        elif result.journal_sha256 and digests in found:
            left_out.append(f"{name} is the same run as {found[digests]}, to the bit")
        else:
            found[digests] = name
            results.append(_completed(result))
    if not results:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise DataError(
            f"there is no finished run among these folders{why}: name the folders of runs, as runs/*"
        )
    return Comparison(tuple(results), tuple(left_out))


def _each(run: Run | Result | str | Path) -> Sequence[Run | Result | str | Path]:
    """The runs of a folder of runs, of a tuning's the fresh ones; all else is one. Raises `DataError`."""
    if not isinstance(run, Run | Result | str | Path):
        raise DataError(f"compare({run!r}): give runs, or the folders of runs")
    if isinstance(run, Run | Result) or (Path(run) / RESULT_FILE).exists():
        return [run]
    places = (Path(run).glob(f"{folder}*/{RESULT_FILE}") for folder in ("", f"{FRESH_RUNS}/"))
    return next((sorted(path.parent for path in found) for place in places if (found := [*place])), [run])


def _result_of(run: Run | Result | str | Path) -> Result:
    if isinstance(run, Result):
        return run
    return run.result if isinstance(run, Run) else Result.read(Path(run))


def _completed(result: Result) -> Result:
    """The result with every parameter of its strategy: to give one its default changes nothing."""
    if result.strategy not in STRATEGIES.built_in:
        return result
    cls = STRATEGIES.find(result.strategy)
    plain = cls()
    defaults = {f.name: getattr(plain, f.name) for f in fields(cls) if f.metadata != NO_KEY}
    strategy = {"name": result.strategy, **defaults, **result.config.get("strategy", {})}
    return replace(result, config={**result.config, "strategy": strategy})


def _flat(row: SpreadRow) -> dict[str, Any]:
    """A row of plain values; what is by metric has its name behind what it is: `final_loss`."""
    found: dict[str, Any] = {}
    for f in fields(row):
        value = getattr(row, f.name)
        if f.name == "seeds":
            found["seeds"] = len(value)
        elif f.name in BY_METRIC:
            for name, its in value.items():
                found |= _columns(f"{BY_METRIC[f.name]}_{name}", its)
        elif isinstance(value, Spread) or f.type == "Spread | None":
            found |= _columns(f.name, value)
        elif not isinstance(value, Mapping):
            found[f.name] = value
    return found


def _columns(name: str, its: Spread | None) -> dict[str, float | None]:
    """Mean and deviation; one value has none, as it does not say how far apart others would be."""
    if its is None:
        return {name: None, f"{name}_std": None}
    return {name: its.mean, f"{name}_std": its.deviation if its.count > 1 else None}


def _ends(name: str, its: Difference | None) -> dict[str, float | None]:
    """A difference with the ends of its interval, and of how many seeds it is."""
    values = (None,) * 4 if its is None else (its.mean, its.low, its.high, its.seeds)
    return dict(zip((name, f"{name}_low", f"{name}_high", f"{name}_seeds"), values, strict=True))
