"""Commands for operators: `config show` and the group `admin`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.api.configuration import load_config, shown
from anabranch.cli.initialise import DataPath
from anabranch.cli.jobs import jobs_app
from anabranch.cli.masked_sums import masked_lines, secagg_app
from anabranch.cli.members import ca_app, enrol, invitations, members, operator, revoke
from anabranch.cli.operating import operates
from anabranch.cli.options import AsJson, ConfigFile, Force, Overrides, check_new
from anabranch.cli.output import Output
from anabranch.cli.overall import bar_or_lines
from anabranch.cli.restoring import attest_restore, backup, rebuild, restore
from anabranch.client.signals import ended_by_interrupt
from anabranch.core.config.goal import Goal
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.config.tables import parse_override
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.text import visible
from anabranch.identity.certificates import time_text
from anabranch.reports.metrics import metric_text
from anabranch.reports.text import NOTHING, bytes_text, count_text, counted, duration_text

if TYPE_CHECKING:
    from anabranch.client.operator import ClientStanding, OperatorClient, PublishedVersion, RunStatus

config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
CLIENTS_AT_ONCE = 1000  # that a server lists, the most suspicious first
admin_app = typer.Typer(
    help="Look after a running server, through its operators' port.", no_args_is_help=True
)

OneClient = Annotated[str, typer.Argument(help="The client's id.", metavar="[CLIENT]")]
OfTag = Annotated[str, typer.Option("--tag", help="All that have this tag now.", metavar="TAG")]

for command in (enrol, invitations, operator, revoke, members, backup, restore, attest_restore, rebuild):
    admin_app.command()(command)
admin_app.add_typer(ca_app, name="ca")
admin_app.add_typer(jobs_app, name="jobs")
admin_app.add_typer(secagg_app, name="secagg")


@config_app.command("show")
def config_show(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting with where its value came from."""
    rows = shown(load_config(config, overrides or ()))
    output = Output(as_json)
    output.result({path: {"value": value, "source": source} for path, value, source in rows})
    output.table("", ["setting", "value", "source"], [[p, repr(v), s] for p, v, s in rows])


@admin_app.command()
@operates
def status(server: OperatorClient, output: Output) -> None:
    """Print how the run stands."""
    s = server.status()
    ended = f"given up: {s.finished}" if s.given_up else s.finished
    state = ended or ("paused" if s.paused else "running")
    updates = f"{counted(s.updates_applied, 'update')} applied, {count_text(s.updates_rejected)} rejected"
    up = f"{bytes_text(s.uplink_bytes)} up ({bytes_text(s.uplink_bytes_raw)} raw)"
    down = f"{bytes_text(s.downlink_bytes)} down ({bytes_text(s.downlink_bytes_full_equivalent)} raw)"
    there = f"{count_text(s.clients_online)} of {counted(s.clients, 'client')}"
    began, up_for = time_text(s.created_at_s), duration_text(s.uptime_s)
    changed = (f"{c.text}, set by {c.by}, {time_text(c.at_s)}" for c in s.settings_changed)
    lines = [
        f"{s.run} ({s.strategy}{s.phase and f', {s.phase}'}): version {count_text(s.version)}, {state}",
        f"  now: {there} online, {count_text(s.live_tasks)} in training",
        f"  since the run began ({began}): {updates}, {counted(s.leases_lost, 'lease')} lost",
        f"  since the server started ({up_for} ago): {up}, {down}, {count_text(s.updates_duplicate)} resent",
        *_rollback_lines(s),
        *([f"  refused for want of room: {s.disk_full}"] if s.disk_full else []),
        *(f"  in quarantine: {client} ({visible(why)})" for client, why in sorted(s.quarantined.items())),
        *(f"  {change}" for change in changed),
    ]
    promise = PrivacyTable.of_json(s.config).promise(s.version + s.sums_lost)
    lines += [] if promise is None else [f"  {promise.text()}"]
    lines += [] if s.masked_sums is None else [f"  {line}" for line in masked_lines(s.masked_sums)]
    lines += [f"  run by two processes at a time: {client}: stop one of them" for client in s.run_twice]
    if s.best_version is not None:
        best = f"{s.best_metric} {metric_text(s.best_metric, s.best_value)}"
        lines.append(f"  best of those held: version {s.best_version}, {best}")
    output.result(s.to_json(), "\n".join(lines))


def _rollback_lines(s: RunStatus) -> list[str]:
    """That the run was rolled back, and what became of its updates."""
    if not s.rollbacks:
        return []
    of_them = f": {count_text(s.updates_left_out)} of the updates applied are left out since"
    return [f"  {counted(s.rollbacks, 'rollback')}{of_them if s.updates_left_out else ''}"]


@admin_app.command()
@operates
def versions(
    server: OperatorClient,
    output: Output,
    after: Annotated[int, typer.Option(help="Only versions above this.", min=0)] = 0,
    last: Annotated[int, typer.Option(help="At most so many, the newest; 0 for all.", min=0)] = 0,
) -> None:
    """List the published versions."""
    if last:
        after = max(after, server.status().version - last)
    rows = _all_versions(server, after)
    _show_versions(output, rows[-last:], _goal(server))  # more may have come since


@admin_app.command()
@operates
def pause(server: OperatorClient, output: Output) -> None:
    """Hand out no more tasks; updates are still taken."""
    server.pause()
    finished = server.status().finished
    after = f": the run has ended ({finished}), and stays paused if `admin set` has it go on"
    output.result({"paused": True, "finished": finished}, "paused" + (after if finished else ""))


@admin_app.command()
@operates
def resume(server: OperatorClient, output: Output) -> None:
    """Hand out tasks again."""
    server.resume()
    finished = server.status().finished
    after = f": but the run has ended ({finished}), and hands out none"
    output.result({"paused": False, "finished": finished}, "resumed" + (after if finished else ""))


@admin_app.command()
@operates
def clients(
    server: OperatorClient,
    output: Output,
    limit: Annotated[int, typer.Option(help="At most so many, and 1000.", min=0)] = 0,
    tag: Annotated[str, typer.Option(help="Only those with this tag.")] = "",
) -> None:
    """List the clients, those with most against them first."""
    rows = server.clients(limit, tag)
    for row in rows:
        output.event("client", "", **row.to_json())
    columns = ["client", "taken", "rejected", "flaws", "shortened", "quarantine", "last seen", "behind"]
    cells = [
        [
            *(row.client_id, str(row.updates_taken), str(row.updates_rejected), str(row.flaws)),
            *(str(row.shortened), row.quarantined, _seen(row)),
            NOTHING if row.versions_behind is None else count_text(row.versions_behind),
        ]
        for row in rows
    ]
    if any(row.width_max < 1 for row in rows):
        columns += ["width", "memory"]
        known = [bytes_text(row.memory_bytes) if row.memory_bytes else NOTHING for row in rows]
        told = zip(cells, rows, known, strict=True)
        cells = [[*line, f"{row.width_max:g}", memory] for line, row, memory in told]
    if any(row.tags for row in rows):
        columns.append("tags")
        cells = [[*line, " ".join(row.tags)] for line, row in zip(cells, rows, strict=True)]
    output.table("", columns, cells)
    of = server.status().clients
    if tag and len(rows) == CLIENTS_AT_ONCE:
        output.warn(f"the first {len(rows)} of that tag, those with most against them first")
    elif not tag and len(rows) < min(limit or of, of):
        output.warn(f"{len(rows)} of {count_text(of)} clients, those with most against them first")


@admin_app.command()
@operates
def tag(
    server: OperatorClient,
    output: Output,
    clients: Annotated[list[str], typer.Argument(help="The clients' ids.", metavar="CLIENT...")],
    add: Annotated[
        list[str] | None, typer.Option("--add", help="A tag to give them; may be repeated.", metavar="TAG")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="One to take away; may be repeated.", metavar="TAG")
    ] = None,
) -> None:
    """Give clients tags, take some away, or say which they have: by a tag they are found again.

    A tag is a note of operators, kept with the run; the server decides nothing by it.
    """
    found = server.tag(clients, add or (), remove or ())
    for client, tags in found.items():
        output.event("tagged", f"{client}: {' '.join(tags) or 'no tags'}", client=client, tags=tags)


@admin_app.command()
@operates
def quarantine(
    server: OperatorClient,
    output: Output,
    client: OneClient = "",
    why: Annotated[str, typer.Option(help="Told to the client.")] = "",
    tag: OfTag = "",
) -> None:
    """Give a client, or all of a tag, no more tasks and take no more of its updates."""
    _check_one(client, tag)
    for name in server.quarantine(client, why, tag):
        output.event("quarantined", f"{name} is in quarantine", client=name, quarantined=True)


@admin_app.command()
@operates
def release(server: OperatorClient, output: Output, client: OneClient = "", tag: OfTag = "") -> None:
    """Let a client, or all of a tag, out of quarantine."""
    _check_one(client, tag)
    released, who = server.release(client, tag), client or f"whoever is tagged {tag}"
    said = f"{who} is out of quarantine" if released else f"{who} was not in quarantine"
    output.result({"client": client, "tag": tag, "released": released}, said)


def _check_one(client: str, tag: str) -> None:
    if bool(client) == bool(tag):
        raise ConfigError("name one CLIENT, or all that have a tag with --tag TAG")


@admin_app.command()
@operates
def rollback(
    server: OperatorClient,
    output: Output,
    to: Annotated[int, typer.Option("--to", help="The last version that is not in doubt.", min=0)],
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", help="A client that is left out and goes into quarantine; may be repeated."
        ),
    ] = None,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="Leave out all later updates, whoever they are of.")
    ] = False,
) -> None:
    """Publish the model as if some clients' updates after a version, or all, had been rejected."""
    if not (without or everyone):
        raise ConfigError("name whose updates are left out with --without CLIENT, or give --everyone")
    version, left_out = server.rollback(to, without or (), everyone)
    found = {"version": version, "updates_left_out": left_out}
    output.result(found, f"version {version}, without {counted(left_out, 'update')}")


@admin_app.command("set")
@operates
def set_settings(
    server: OperatorClient,
    output: Output,
    settings: Annotated[
        list[str], typer.Argument(help="Settings of the run; all or none.", metavar="TABLE.KEY=VALUE...")
    ],
) -> None:
    """Change settings of the run while it goes on: budgets, leases, rates, bounds, local training.

    A run that had ended goes on where its budget is larger now; its devices are to be started again.
    """
    given = [parse_override(text, "") for text in settings]
    done = server.set_settings({f"{table}.{key}": value for table, key, value in given})
    lines = done.lines()
    if not done.changes:
        lines.insert(0, "nothing to change: it is so already")
    if done.finished and not done.reopened:
        lines.append(f"it does not go on: {done.finished}")
    output.result(done.to_json(), "\n".join(lines))
    for warning in done.warnings:
        output.warn(warning)


# Whoever opens such a file by its name meets safetensors, and an error that says nothing of them.
OTHER_FORMATS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".onnx", ".npz", ".npy", ".h5")


@admin_app.command()
@operates
def export(
    server: OperatorClient,
    output: Output,
    out: Annotated[
        Path | None, typer.Argument(help="The safetensors file to write.", metavar="FILE", show_default=False)
    ] = None,
    version: Annotated[int | None, typer.Option(help="The newest if not given.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best that was measured: run.metric.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Only say which versions there are.")] = False,
    merge: Annotated[
        str,
        typer.Option("--merge", help="The run's App: its plain model, adapters merged.", metavar="APP"),
    ] = "",
    stage: Annotated[
        int,
        typer.Option(help="Of a model that grows: only the blocks and the head of this stage.", min=0),
    ] = 0,
    force: Force = False,
    data_path: DataPath = "",
) -> None:
    """Write a version's weights as a safetensors file: the newest, the best, or another that is held.

    With --merge APP the App's code is run here: the file has W + (alpha / rank) B A in the place of W, or
    whatever the App's `merged` makes of the run's tensors.
    """
    if listed:
        rows = [row for row in _all_versions(server, held=True) if row.held]
        _show_versions(output, rows, _goal(server))
        return
    if out is None or (best and version is not None):
        raise ConfigError("name one FILE to write, with --best or --version N or neither; --list says which")
    if out.suffix in OTHER_FORMATS:
        raise ConfigError(f"{out}: what is written is safetensors: name it {out.with_suffix('.safetensors')}")
    check_new(out, force)
    if merge and stage:
        raise ConfigError("--stage or --merge: an App's plain model has no stages")
    with bar_or_lines(output, patient=True) as show:

        def tell(written: int, size: int) -> None:
            show(
                min(1.0, written / size) if size else 0.0,
                f"{out}: {bytes_text(written)} of {bytes_text(size)}",
            )

        if merge:
            from anabranch.client.exporting import export_merged
            from anabranch.workloads import load_app

            exported = export_merged(server, load_app(merge, data_path), out, version, best, tell)
        else:
            exported = server.export(out, version, best, stage, tell)
    output.result({"version": exported, "file": str(out)}, f"version {exported}: {out}")


@admin_app.command()
@operates
def watch(
    server: OperatorClient,
    output: Output,
    after: Annotated[
        int | None,
        typer.Option(help="Begin after this number, as far back as is kept; without it: from now on.", min=0),
    ] = None,
) -> None:
    """Print what happens, as it happens, until the server stops (exit code 0) or Ctrl-C.

    Where the server is gone, or has failed, it ends with 24.
    """
    with ended_by_interrupt(server.close):
        for e in server.watch(after):
            told = {"client": e.client_id, "version": e.version, **e.data}
            words = " ".join(f"{k}={v}" for k, v in told.items() if v not in ("", None))
            line = f"{time_text(e.at_s)} #{e.seq} {e.kind} {words}"
            output.event(e.kind, visible(line), **e.to_json())  # one, whatever a device has said in it
    output.warn("the server has stopped serving the run")


def _all_versions(server: OperatorClient, after: int = 0, held: bool = False) -> list[PublishedVersion]:
    """Every published version above this one; `held`: as `OperatorClient.versions`."""
    return list(chain.from_iterable(server.pages_of_versions(after, held=held)))


def _goal(server: OperatorClient) -> Goal:
    """What the run is judged by."""
    return Goal.of_json(server.status().config)


def _show_versions(output: Output, rows: list[PublishedVersion], goal: Goal) -> None:
    """A table of them, with the metric that counts."""
    for row in rows:
        output.event("version", "", **row.to_json())
    found = goal.among({name for r in rows for name in r.metrics}).metric
    metric = ACCURACY if found == AUTO else found
    cells = [
        [
            *(str(r.version), str(r.updates), metric_text(metric, r.metrics.get(metric))),
            *("yes" if r.held else "", (r.sha256 or "")[:16]),
        ]
        for r in rows
    ]
    output.table("", ["version", "updates", metric, "held", "sha256"], cells)


def _seen(client: ClientStanding) -> str:
    """Of a table: whether it is online, or when it was last."""
    if client.online:
        return "online"
    return NOTHING if client.last_seen_s is None else time_text(client.last_seen_s)
