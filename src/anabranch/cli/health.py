"""`health`: what a container or a supervisor asks every few seconds, so it imports little."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.options import AsJson, Identity
from anabranch.cli.output import Output
from anabranch.client.channel import check_not_guarded
from anabranch.client.operator import check_health, operator_wallet
from anabranch.core.errors import Unavailable


def health(
    address: Annotated[
        str, typer.Argument(help="A server's address.", metavar="HOST:PORT")
    ] = "127.0.0.1:7070",
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server whether it serves; exit code 0 if it does."""
    wallet = operator_wallet(identity)
    if not check_health(address, wallet=wallet):
        if wallet is None:
            check_not_guarded(address)
        raise Unavailable(f"{address} does not serve")
    Output(as_json).result({"serving": True}, "serving")
