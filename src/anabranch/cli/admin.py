"""Commands for operators: `health`, `config show` and the group `admin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.configuration import load_config, shown
from anabranch.cli.options import AsJson, ConfigFile, Overrides
from anabranch.cli.output import Output
from anabranch.core.errors import Unavailable
from anabranch.reports.text import bytes_text, count_text, duration_text, percent_text

config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
admin_app = typer.Typer(
    help="Look after a running server, through its operators' port.", no_args_is_help=True
)

Admin = Annotated[str, typer.Option("--admin", help="The operators' address.", metavar="HOST:PORT")]
ADMIN_ADDRESS = "127.0.0.1:7071"


@config_app.command("show")
def config_show(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting with where its value came from."""
    rows = shown(load_config(config, overrides or ()))
    output = Output(as_json)
    output.result({path: {"value": value, "source": source} for path, value, source in rows})
    output.table("", ["setting", "value", "source"], [[p, repr(v), s] for p, v, s in rows])


def health(
    address: Annotated[
        str, typer.Argument(help="A server's address.", metavar="HOST:PORT")
    ] = "127.0.0.1:7070",
    as_json: AsJson = False,
) -> None:
    """Ask a server whether it serves; exit code 0 if it does."""
    from anabranch.client.operator import check_health

    serving = check_health(address)
    if not serving:
        raise Unavailable(f"{address} does not serve")
    Output(as_json).result({"serving": True}, "serving")


@admin_app.command()
def status(admin: Admin = ADMIN_ADDRESS, as_json: AsJson = False) -> None:
    """Print how the run stands."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        s = operator.status()
    state = s.finished or ("paused" if s.paused else "running")
    updates = (
        f"{s.updates_applied} updates applied, {s.updates_rejected} rejected, {s.updates_duplicate} resent"
    )
    up = f"{bytes_text(s.uplink_bytes)} up ({bytes_text(s.uplink_bytes_raw)} raw)"
    down = f"{bytes_text(s.downlink_bytes)} down ({bytes_text(s.downlink_bytes_full_equivalent)} raw)"
    lines = [
        f"{s.run} ({s.strategy}): version {count_text(s.version)}, {state}",
        f"  {updates}",
        f"  {s.clients} clients, {s.live_tasks} in training, {s.leases_lost} leases lost",
        f"  {up}, {down}; up for {duration_text(s.uptime_s)}",
        *(f"  in quarantine: {client} ({why})" for client, why in sorted(s.quarantined.items())),
    ]
    Output(as_json).result(s.to_json(), "\n".join(lines))


@admin_app.command()
def versions(
    admin: Admin = ADMIN_ADDRESS,
    after: Annotated[int, typer.Option(help="Only versions above this.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """List the published versions."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        rows = operator.versions(after)
    output = Output(as_json)
    for row in rows:
        output.event("version", "", **row.to_json())
    cells = [
        [str(r.version), str(r.updates), percent_text(r.metrics.get("accuracy")), (r.sha256 or "")[:16]]
        for r in rows
    ]
    output.table("", ["version", "updates", "accuracy", "sha256"], cells)


@admin_app.command()
def pause(admin: Admin = ADMIN_ADDRESS, as_json: AsJson = False) -> None:
    """Hand out no more tasks; updates are still taken."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        operator.pause()
    Output(as_json).result({"paused": True}, "paused")


@admin_app.command()
def resume(admin: Admin = ADMIN_ADDRESS, as_json: AsJson = False) -> None:
    """Hand out tasks again."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        operator.resume()
    Output(as_json).result({"paused": False}, "resumed")


@admin_app.command()
def clients(
    admin: Admin = ADMIN_ADDRESS,
    limit: Annotated[int, typer.Option(help="At most so many; 0 for 1000.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """List the clients, those with most against them first."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        rows = operator.clients(limit)
    output = Output(as_json)
    for row in rows:
        output.event("client", "", **row.to_json())
    columns = ["client", "taken", "rejected", "flaws", "shortened", "quarantine"]
    cells = [[str(value) for value in row.to_json().values()] for row in rows]
    output.table("", columns, cells)


@admin_app.command()
def quarantine(
    client: Annotated[str, typer.Argument(help="The client's id.", metavar="CLIENT")],
    why: Annotated[str, typer.Option(help="Told to the client.")] = "",
    admin: Admin = ADMIN_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Give a client no more tasks and take no more of its updates."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        operator.quarantine(client, why)
    Output(as_json).result({"client": client, "quarantined": True}, f"{client} is in quarantine")


@admin_app.command()
def release(
    client: Annotated[str, typer.Argument(help="The client's id.", metavar="CLIENT")],
    admin: Admin = ADMIN_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Let a client out of quarantine."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        released = operator.release(client)
    said = f"{client} is out of quarantine" if released else f"{client} was not in quarantine"
    Output(as_json).result({"client": client, "released": released}, said)


@admin_app.command()
def rollback(
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
    admin: Admin = ADMIN_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Publish the model as if some clients' updates after a version, or all, had been rejected."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        version, left_out = operator.rollback(to, without or (), everyone)
    found = {"version": version, "updates_left_out": left_out}
    Output(as_json).result(found, f"version {version}, without {left_out} updates")


@admin_app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", metavar="FILE")],
    admin: Admin = ADMIN_ADDRESS,
    version: Annotated[int | None, typer.Option(help="The newest if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version's weights as a safetensors file."""
    from anabranch.client.operator import OperatorClient

    with OperatorClient(admin) as operator:
        exported = operator.export(out, version)
    Output(as_json).result({"version": exported, "file": str(out)}, f"version {exported}: {out}")


@admin_app.command()
def watch(admin: Admin = ADMIN_ADDRESS, as_json: AsJson = False) -> None:
    """Print what happens, as it happens."""
    from anabranch.client.operator import OperatorClient

    output = Output(as_json)
    with OperatorClient(admin) as operator:
        for e in operator.watch():
            who = f" {e.client_id}" if e.client_id else ""
            output.event(e.kind, f"{e.at_s:.3f} {e.kind}{who} version {e.version} {e.data}", **e.to_json())
