"""Commands for whoever keeps the authority: `admin ca init`, `enrol`, `operator`, `revoke`, `members`.

They work on the authority's folder, beside a running server or without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.options import AsJson
from anabranch.cli.output import Output
from anabranch.core.config.tables import IdentityTable
from anabranch.core.errors import ConfigError
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import new_key, time_text
from anabranch.identity.wallet import Wallet, read_wallet

ca_app = typer.Typer(help="The federation's own certificate authority.", no_args_is_help=True)

Folder = Annotated[
    Path,
    typer.Option(
        "--folder", envvar="ANABRANCH_IDENTITY_FOLDER", help="The authority's folder.", metavar="DIR"
    ),
]
Name = Annotated[str, typer.Argument(help="1 to 64 letters, digits, '.', '_', '-'.", metavar="NAME")]
FOLDER = Path(IdentityTable.folder)


@ca_app.command("init")
def ca_init(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Make the authority that decides who belongs to the federation."""
    with Authority.create(folder) as authority:
        sha256 = authority.sha256
    Output(as_json).result(
        {"folder": str(folder), "ca_sha256": sha256},
        f"{folder}: an authority; keep a copy of this folder where nobody else can read it\n"
        f"ca-sha256: {sha256}\nlet devices in with:\n  anabranch admin enrol NAME",
    )


@ca_app.command("show")
def ca_show(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Print the authority's fingerprint, which devices need to join."""
    with Authority.open(folder) as authority:
        Output(as_json).result({"folder": str(folder), "ca_sha256": authority.sha256}, authority.sha256)


@ca_app.command("restored")
def ca_restored(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Say that the authority's folder was restored from a backup, so that a server starts on it again.

    Revoke again whom the backup does not know to be revoked; tokens that it knows count no more.
    """
    with Authority.open(folder) as authority:
        authority.declare_restored()
    text = f"{folder}: no token of before counts; look at `anabranch admin members`, and revoke again"
    Output(as_json).result({"folder": str(folder)}, text)


def enrol(
    name: Name,
    folder: Folder = FOLDER,
    valid_s: Annotated[float, typer.Option(help="How long the token is good for, seconds.", min=1.0)] = DAY_S,
    as_json: AsJson = False,
) -> None:
    """Make a token with which one device joins once, under this name.

    Who has the token is that device: hand it over as you would a password.
    """
    with Authority.open(folder) as authority:
        token, sha256, until = authority.invite(name, valid_s), authority.sha256, authority.now() + valid_s
    Output(as_json).result(
        {"name": name, "token": token, "ca_sha256": sha256, "expires_at_s": until},
        f"a token for {name}, good once and until {time_text(until)}; on the device:\n"
        f"  anabranch client APP --server HOST:7070 --token {token} --ca-sha256 {sha256}",
    )


def operator(
    name: Name,
    folder: Folder = FOLDER,
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder to write; NAME if not given.", metavar="DIR")
    ] = None,
    valid_s: Annotated[float, typer.Option(help="How long it is good for, seconds.", min=1.0)] = 90 * DAY_S,
    as_json: AsJson = False,
) -> None:
    """Make the key and the certificate of an operator, for `--identity` of the other commands."""
    out = out or Path(name)
    if read_wallet(out) is not None:
        raise ConfigError(f"{out} has an identity already: name another folder with --out")
    with Authority.open(folder) as authority:
        key = new_key()
        made = authority.operator(name, key.public_key(), valid_s)
        wallet = Wallet(out, key, made, authority.certificate)
        wallet.save()
    until = wallet.peer.not_after
    Output(as_json).result(
        {"name": name, "folder": str(out), "expires_at_s": until},
        f"{out}: operator {name}, until {time_text(until)}; use it with:\n"
        f"  anabranch admin status --admin HOST:7071 --identity {out}",
    )


def revoke(name: Name, folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Shut a device or an operator out, from its next call on; its unused tokens as well."""
    with Authority.open(folder) as authority:
        count = authority.revoke(name)
    if not count:
        raise ConfigError(f"{name!r} has no certificate or token that counts: see `anabranch admin members`")
    Output(as_json).result({"name": name, "revoked": count}, f"{name} is revoked")


def members(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """List everybody who has had a certificate."""
    with Authority.open(folder) as authority:
        found, now = authority.members(), authority.now()
    output, cells = Output(as_json), []
    for m in found:
        state = "revoked" if m.revoked else "expired" if m.expires_at <= now else "good"
        output.event("member", "", name=m.name, member=m.kind, state=state, expires_at_s=m.expires_at)
        cells.append([m.name, m.kind, state, time_text(m.expires_at)])
    output.table("", ["name", "is", "certificate", "until"], cells)
