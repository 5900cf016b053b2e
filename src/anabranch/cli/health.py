"""`health`: what a container or a supervisor asks every few seconds, so it imports little."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.options import AsJson, Identity
from anabranch.cli.output import Output
from anabranch.client.guarded import check_not_guarded
from anabranch.client.health import check_health
from anabranch.core.errors import Unavailable
from anabranch.identity.addresses import JOB_HEALTH, split_job


def health(
    address: Annotated[
        str,  # as `[/JOB]` it would be markup to rich: a traceback in the place of what was typed wrongly
        typer.Argument(help="A server's address; HOST:PORT/JOB is that of a job on it.", metavar="HOST:PORT"),
    ] = "127.0.0.1:7070",
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server whether it serves; exit code 0 if it does."""
    wallet = None
    if identity is not None:
        # Here: a port of this machine's is asked without.
        from anabranch.client.operator import operator_wallet

        wallet = operator_wallet(identity)
    where, job = split_job(address)
    if not check_health(where, wallet=wallet):
        if wallet is None:
            check_not_guarded(where)
        raise Unavailable(f"{where} does not serve")
    if job and not check_health(where, JOB_HEALTH + job, wallet=wallet):
        raise Unavailable(f"{where} serves, its job {job!r} does not: see `anabranch admin jobs list`")
    Output(as_json).result({"serving": True}, "serving")
