"""Commands on what runs left behind: compare, report, replay, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.comparing import Comparison
from anabranch.api.comparing import compare as compare_runs
from anabranch.api.live_result import report_of_data, same_before
from anabranch.api.run import open_run
from anabranch.cli.options import Archive, AsJson, Out, RunFolder
from anabranch.cli.output import Output, Ticker
from anabranch.cli.overall import along_log, bar_or_lines
from anabranch.cli.parts import LoadCode, admit_data, admit_trackers
from anabranch.cli.summary import summary
from anabranch.core.errors import DataError, StoreCorrupt
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.reports.equal import equally_far
from anabranch.reports.folders import claimed
from anabranch.reports.html import write_report
from anabranch.reports.journal_files import JOURNAL
from anabranch.reports.metrics import metric_text
from anabranch.reports.pairs import PAIRED, paired, paired_lines
from anabranch.reports.result import DEVICES, GROUPS, RESULT_FILE, Result
from anabranch.reports.spreads import SpreadRow, grouped, over, spread_text
from anabranch.reports.text import NOTHING, bytes_text, count_text, duration_text
from anabranch.reports.trackers import tell_of
from anabranch.support.folders import check_folder

METRICS_MAX = 4  # the page has them all


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            help="What to write: a page (.html), a table (.csv, .tex), a figure (.svg, .png). Repeatable;"
            " compare.html if not given.",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put runs side by side: a table, and a page with their curves over each other."""
    tell_comparison(Output(as_json), compare_runs(folders), *(out or [Path("compare.html")]))


def tell_comparison(output: Output, found: Comparison, *out: Path) -> None:
    """Write these files, and show the table of it."""
    for said in found.left_out:
        output.warn(f"left out: {said}")
    rows = found.spreads
    for path in out:
        found.save(path)
    output.result({"page": str(out[0]), "files": [*map(str, out)], "rows": [asdict(r) for r in rows]})
    workloads = {r.workload for r in rows}
    one = f"{workloads.pop()}: " if len(workloads) == 1 else ""
    judged = dict.fromkeys(r.metric for r in rows if r.metric != AUTO)
    metrics = list(dict.fromkeys([*judged, ACCURACY, *(name for r in rows for name in r.metrics)]))
    columns = [
        ("strategy", [f"{r.label}, {r.kind}" + ("" if one else f" ({r.workload})") for r in rows]),
        ("seeds", [str(len(r.seeds)) for r in rows]),
        *((f"final {name}", [_final(r, name) for r in rows]) for name in metrics[:METRICS_MAX]),
        *((f"worst tenth of {what}", [_worst(r, what) for r in rows]) for what in (GROUPS, DEVICES)),
        ("time to target", [spread_text(r.time_to_target_s, duration_text) for r in rows]),
        ("updates", [spread_text(r.updates_applied, lambda n: f"{n:.0f}") for r in rows]),
        ("uplink", [spread_text(r.uplink_bytes, bytes_text) for r in rows]),
        ("downlink", [spread_text(r.downlink_bytes, bytes_text) for r in rows]),
    ]
    told = [(name, cells) for name, cells in columns if any(cell != NOTHING for cell in cells)]
    lines = [list(line) for line in zip(*(cells for _, cells in told), strict=True)]
    output.table(f"{one}mean ± standard deviation over seeds", [name for name, _ in told], lines)
    _tell_equal(output, found.results)
    _tell_paired(output, found.results)
    output.say(f"page: {out[0]}" if len(out) == 1 else f"written: {', '.join(map(str, out))}")


def _tell_equal(output: Output, results: Sequence[Result]) -> None:
    """What each kind had come to when the run that came least far had ended, by each way to measure that."""
    for (workload, kind), groups in grouped(results).items():
        if not (found := equally_far(groups)):
            continue
        cells = (
            [spread_text(r.value, partial(metric_text, r.metric)) for r in rows] for rows in found.values()
        )
        lines = [list(line) for line in zip((g.label for g in groups), *cells, strict=True)]
        [metric] = {r.metric for rows in found.values() for r in rows}
        output.say(f"{workload}, {kind}: {metric} when the run that came least far had ended:")
        output.table("", ["strategy", *found], lines)


def _tell_paired(output: Output, results: Sequence[Result]) -> None:
    """How much more each kind came to than the first, where they ran from the same seeds."""
    for (workload, kind), groups in grouped(results).items():
        rows = paired([run for group in groups for run in group.runs])
        if any(row.final_value for row in rows):
            output.say(f"{workload}, {kind}: more than {rows[0].base}, {PAIRED}:")
            output.table("", *paired_lines(rows))


def report(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a run, or a stopped server's data directory.", metavar="RUN")
    ],
    out: Out = None,
    database: Annotated[str, typer.Option(help="The data directory's database, where not SQLite.")] = "",
    archive: Archive = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            help="Tell this tracker of the run, as if it had been there.", metavar="NAME|PATH.PY:CLASS"
        ),
    ] = None,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Write report.html: again from a run's result.json, or first from a server's data."""
    output, trackers = Output(as_json), tracker or ()
    admit_trackers(trackers)
    if (folder / RESULT_FILE).is_file() or (folder / JOURNAL).is_file():
        result = Result.read(folder)
        page = write_report(result, out or folder, run=folder)
        tell_of(result, folder, trackers)
        output.result({"page": str(page)}, f"report: {page}")
        return
    check_folder(folder, "name the folder of a run, or a server's data_dir")
    if not database:
        _check_single(folder)
    admit_data(folder, database, load_code)
    base = out or folder / "run"
    with claimed(base, explicit=out is not None) as target:
        with along_log(output, folder) as tell:
            result = report_of_data(folder, database, target, archive, tell)
        same = same_before(target, base, result)
    tell_of(result, same or target, trackers)
    output.result(result.to_json(), summary(result, same or target))


def _check_single(folder: Path) -> None:
    """Raises `DataError` where runs lie below, as in a sweep's folder, and no server's data here."""
    from anabranch.api.cockpit import runs_below
    from anabranch.server.job_folder import DATA
    from anabranch.server.manifest import kept_manifest

    of_server = any(kept_manifest(data).exists() for data in (folder, folder / DATA))
    if not of_server and (run := next(runs_below(folder), None)):
        raise DataError(f"{folder} holds no run, but runs lie below it: name one of those, such as {run}")


def replay(folder: RunFolder, load_code: LoadCode = False, as_json: AsJson = False) -> None:
    """Replay a run's journal through a fresh engine and compare the digests."""
    output = Output(as_json)
    with bar_or_lines(output, patient=True) as show:
        words = f"replaying {folder}"
        outcome = open_run(folder, load_code=load_code).replay(tell=lambda share: show(share, words))
    output.result(
        asdict(outcome),
        f"{folder}: replayed {outcome.version} versions, digests equal\n"
        f"  model   {outcome.model_sha256}\n  journal {outcome.journal_sha256}",
    )


def verify(
    data_dir: Annotated[Path, typer.Argument(help="A server's data directory.", metavar="DATA_DIR")],
    database: Annotated[str, typer.Option(help="The database URL, where it is not SQLite.")] = "",
    ca_sha256: Annotated[
        list[str] | None,
        typer.Option(
            help="Every update must be signed by a device of this authority; may be repeated, where a run "
            "has had one after the other.",
            metavar="HEX",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="From the first event, whatever was proved before.")
    ] = False,
    archive: Archive = None,
    load_code: LoadCode = False,
    as_json: AsJson = False,
) -> None:
    """Check every invariant of a server's data: log, blobs, a replay, digests, signatures.

    It goes on from where it last found all to be sound.
    """
    from anabranch.server.verify import verify as verify_data

    output = Output(as_json)
    admit_data(data_dir, database, load_code)
    signers = ",".join(sorted(ca_sha256 or ()))
    with Ticker(output, patient=True) as ticker:

        def tell(seq: int) -> None:
            ticker.show(f"{data_dir}: replayed up to event {count_text(seq)}", events=seq)

        found = verify_data(data_dir, database, signers, whole, archive, tell=tell)
    output.result(asdict(found))
    if found.problems:
        listed = found.listed
        more = len(found.problems) - len(listed)
        listed += [f"- and {more} others (--json has all)"] if more > 0 else []
        raise StoreCorrupt(f"{data_dir}: {len(found.problems)} problems:\n" + "\n".join(listed))
    signed, since = f" ({found.signed} signed)", ""
    if found.proved_from:  # those before were not looked at
        since = f" from event {found.proved_from + 1} on{signed}, {_before(found.proved_at)},"
        signed = ""
    output.say(
        f"{data_dir}: sound. Version {found.version}, {found.updates} updates{signed}, "
        f"replayed{since} to the same digest\n"
        f"  state {found.state_sha256}"
    )


def _before(proved_at: float) -> str:
    """Why a proof does not begin with the first event."""
    if not proved_at:
        return "where the log begins"
    from anabranch.identity.certificates import time_text  # here, as no command of simulations waits for it

    return f"what comes before was proved {time_text(proved_at)} (--whole: again)"


def _final(r: SpreadRow, name: str) -> str:
    return spread_text(
        r.final_accuracy if name == ACCURACY else r.metrics.get(name), partial(metric_text, name)
    )


def _worst(r: SpreadRow, what: str) -> str:
    """How the worst tenth of groups or devices fares by what the run is judged by."""
    return spread_text(r.worst_tenths.get(over(r.metric, what)), partial(metric_text, r.metric))
