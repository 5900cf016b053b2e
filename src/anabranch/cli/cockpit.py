"""`ui`: the cockpit in a browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.api.cockpit import runs_in, runs_of_server
from anabranch.cli.logs import LogLevel, set_up_logging
from anabranch.cli.options import Archive, AsJson, Identity, Insecure
from anabranch.cli.output import Output
from anabranch.cli.starter import UntilEof, stop_at_eof
from anabranch.core.errors import ConfigError

if TYPE_CHECKING:
    from anabranch.client.operator import OperatorClient
    from anabranch.cockpit.runs import Runs

RUNS = Path("runs")  # where simulations leave theirs

Listen = Annotated[str, typer.Option("--listen", help="Where browsers find it.", metavar="HOST:PORT")]
TlsCertificate = Annotated[
    Path | None, typer.Option(help="Serve with TLS: the certificate, PEM.", metavar="FILE")
]
TlsKey = Annotated[Path | None, typer.Option(help="Its key.", metavar="FILE")]
TlsAuthority = Annotated[
    Path | None, typer.Option(help="Every browser needs a certificate of this authority.", metavar="FILE")
]


def ui(
    what: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a run, of runs (runs), or a stopped server's data.", metavar="WHAT"
        ),
    ] = None,
    admin: Annotated[
        str, typer.Option("--admin", help="A running server, by its operators' address.", metavar="HOST:PORT")
    ] = "",
    identity: Identity = None,
    insecure: Insecure = False,
    listen: Listen = "127.0.0.1:7080",
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_authority: TlsAuthority = None,
    database: Annotated[str, typer.Option(help="The data directory's database, where not SQLite.")] = "",
    archive: Archive = None,
    until_eof: UntilEof = False,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Look at runs in a browser: finished ones, and those that are under way, live or simulated."""
    from anabranch.cockpit.serving import papers_of, serve

    set_up_logging(as_json, log_level)
    output = Output(as_json)
    papers = papers_of(tls_certificate, tls_key, tls_authority)

    def opened(link: str) -> None:
        output.event("cockpit", f"cockpit (this link is good for one browser): {link}", link=link)

    stop = threading.Event()
    if until_eof:
        stop_at_eof(stop.set)
    with _runs(what, admin, identity, insecure, database, archive) as runs:
        asyncio.run(serve(runs, listen, papers, opened, stop))


@contextmanager
def _runs(
    what: Path | None, admin: str, identity: Path | None, insecure: bool, database: str, archive: Path | None
) -> Iterator[Runs]:
    """What was asked for. Raises `ConfigError`."""
    if not admin:
        yield runs_in(what or RUNS, database, archive)
        return
    if what is not None:
        raise ConfigError(f"name {what}, or a server by --admin {admin}: one of them")
    from anabranch.client.operator import open_operator, operator_wallet

    wallet = operator_wallet(identity)
    with ExitStack() as stack:

        def opened(address: str) -> OperatorClient:
            return stack.enter_context(open_operator(address, wallet, insecure))

        yield runs_of_server(admin, opened, "" if wallet is None else wallet.name)
