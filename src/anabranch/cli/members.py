"""Commands for whoever keeps the authority: `admin ca`, `enrol`, `invitations`, `operator`, `revoke` ...

They work on the authority's folder, beside a running server or without one.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.options import AsJson
from anabranch.cli.output import Output
from anabranch.core.config.tables import IdentityTable
from anabranch.core.errors import ConfigError
from anabranch.identity.authority import AUTHORITY_LIFE_S, DAY_S, Authority
from anabranch.identity.certificates import new_key, time_text
from anabranch.identity.files import write_private
from anabranch.identity.wallet import Wallet, read_wallet

ca_app = typer.Typer(help="The federation's own certificate authority.", no_args_is_help=True)

FOLDER_VARIABLE = "ANABRANCH_IDENTITY_FOLDER"
Folder = Annotated[
    Path,
    typer.Option("--folder", envvar=FOLDER_VARIABLE, help="The authority's folder.", metavar="DIR"),
]
Name = Annotated[str, typer.Argument(help="1 to 64 ASCII letters, digits, '.', '_', '-'.", metavar="NAME")]
FOLDER = Path(IdentityTable.folder)
ELSEWHERE = "HOST is the server's name, and 7070 its port unless server.address says another"
COLUMNS = ("name", "token", "ca_sha256", "expires_at_s")


@ca_app.command("init")
def ca_init(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Make the authority that decides who belongs to the federation."""
    with Authority.create(folder) as authority:
        sha256 = authority.sha256
    Output(as_json).result(
        {"folder": str(folder), "ca_sha256": sha256},
        f"{folder}: an authority; keep a copy of this folder where nobody else can read it\n"
        f"ca-sha256: {sha256}\nlet devices in with:\n  {_of('enrol NAME', folder)}",
    )


def _of(command: str, folder: Path) -> str:
    """A command for this authority, and not for that of the usual folder."""
    usual = folder == Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)
    return f"anabranch admin {command}{'' if usual else f' --folder {shlex.quote(str(folder))}'}"


@ca_app.command("show")
def ca_show(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Print the authority's fingerprint, which devices need to join; on stderr, when the authority ends."""
    with Authority.open(folder) as authority:
        sha256, until, ending = authority.sha256, authority.ends_at, authority.ending()
    output = Output(as_json)
    output.result({"folder": str(folder), "ca_sha256": sha256, "expires_at_s": until}, sha256)
    if not ending and not as_json:
        ending = f"the authority in {folder} ends on {time_text(until)}, and with it whatever it signs"
    _tell_ending(output, ending)  # beside the answer, which scripts hand on as it is


@ca_app.command("copy")
def ca_copy(
    to: Annotated[Path, typer.Argument(help="A folder that is empty or not there.", metavar="DIR")],
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Copy the authority's folder as it is at one moment, while a server serves with it.

    Whoever has the copy can make anybody a member.
    """
    with Authority.open(folder) as authority:
        authority.copy(to)
        sha256 = authority.sha256
    text = f"{to}: a copy of the authority in {folder}; keep it where nobody else can read it"
    Output(as_json).result({"folder": str(to), "ca_sha256": sha256}, text)


@ca_app.command("restored")
def ca_restored(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Say that the authority's folder was restored from a backup, so that a server starts on it again.

    Revoke again whom the backup does not know to be revoked; tokens that it knows count no more.
    """
    with Authority.open(folder) as authority:
        authority.declare_restored()
    text = f"{folder}: no token of before counts; look at `{_of('members', folder)}`, and revoke again"
    Output(as_json).result({"folder": str(folder)}, text)


@dataclass(frozen=True)
class Tokens:
    """What some devices are handed, each its own."""

    names: Sequence[str]
    tokens: Sequence[str]
    ca_sha256: str
    until: float

    def rows(self) -> list[tuple[str, ...]]:
        """By `COLUMNS`."""
        return [
            (name, token, self.ca_sha256, f"{self.until:.0f}")
            for name, token in zip(self.names, self.tokens, strict=True)
        ]


def read_token(file: Path) -> tuple[str, str]:
    """What a device was handed in a file: a token, and the authority's fingerprint or "".

    The file has the token alone, or the device's line of what `enrol` has written, with the head or without.
    Raises `ConfigError`.
    """
    rows = _rows("--token-file", file)
    if rows and tuple(rows[0]) == COLUMNS:
        del rows[0]
    if len(rows) != 1 or len(rows[0]) not in (1, len(COLUMNS)):
        raise ConfigError(
            f"--token-file {file} has {len(rows)} lines, or others than `anabranch admin enrol` writes: "
            "a device is handed its own line, or the token in it"
        )
    line = [cell.strip() for cell in rows[0]]
    return (line[0], "") if len(line) == 1 else (line[1], line[2])


def _rows(option: str, file: Path) -> list[list[str]]:
    """The lines of a table that are not empty; where a comma is for decimals, spreadsheets write others.

    Raises `ConfigError`, which names the option that names the file.
    """
    try:
        text = file.read_text("utf-8-sig")
        between = next((mark for mark in ";\t" if mark in text.partition("\n")[0]), ",")
        return [row for row in csv.reader(io.StringIO(text), delimiter=between) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{option} {file} cannot be read as CSV in UTF-8: {error}") from error


def enrol(
    name: Annotated[
        str, typer.Argument(help="1 to 64 ASCII letters, digits, '.', '_', '-'.", metavar="[NAME]")
    ] = "",
    count: Annotated[
        int | None, typer.Option(help="So many devices: NAME-0, NAME-1 and so on.", min=1, max=100_000)
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            "--names",
            help="The names, from the first column of a CSV file or the one called name.",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the tokens to this CSV file, and not here.", metavar="FILE"),
    ] = None,
    folder: Folder = FOLDER,
    valid_s: Annotated[float, typer.Option(help="How long a token is good for, seconds.", min=1.0)] = DAY_S,
    as_json: AsJson = False,
) -> None:
    """Make a token with which one device joins once, under this name; or one for each of many.

    Who has the token is that device: hand it over as you would a password.
    """
    _check_valid(valid_s)
    wanted = _names(name, count, names)
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already: it may hold tokens, name another file")
    with Authority.open(folder) as authority:
        until, ending = authority.until(valid_s), authority.ending()
        made = Tokens(wanted, authority.invite_all(wanted, valid_s), authority.sha256, until)
    output = Output(as_json)
    _hand_over(output, made, out, alone=count is None and names is None)
    _tell_ending(output, ending)


def _tell_ending(output: Output, ending: str) -> None:
    """The server says so too; who lets members in may look at no log."""
    if ending:
        output.warn(ending)


def _check_valid(valid_s: float) -> None:
    if not 1.0 <= valid_s <= AUTHORITY_LIFE_S:  # nor is it no number
        raise ConfigError(
            f"--valid-s must be 1 to {AUTHORITY_LIFE_S:.0f} (ten years, as the authority), not {valid_s:g}"
        )


def _names(name: str, count: int | None, file: Path | None) -> list[str]:
    """Who is to be let in. Raises `ConfigError` unless it was said in one way."""
    if bool(name) == (file is not None) or (count is not None and file is not None):
        raise ConfigError("say who: NAME, NAME with --count N, or --names FILE")
    if file is None:
        return [name] if count is None else [f"{name}-{number}" for number in range(count)]
    rows = _rows("--names", file)
    head = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = head.index("name") if "name" in head else 0
    found = [row[column].strip() if column < len(row) else "" for row in rows["name" in head :]]
    if not found:
        raise ConfigError(f"--names {file}: there is no name in it")
    if twice := [one for one, times in Counter(found).items() if times > 1]:
        raise ConfigError(f"--names {file}: {twice[0]!r} is there twice")
    return found


def _hand_over(output: Output, made: Tokens, out: Path | None, alone: bool) -> None:
    """Tokens go to a file for their owner alone, or to whoever typed the command."""
    text, sha256 = f"until {time_text(made.until)}", made.ca_sha256
    told = {"ca_sha256": sha256, "expires_at_s": made.until}
    if out is not None:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *made.rows()])
        write_private(out, file.getvalue().encode(), replace=False)
        said = f"{out}: {len(made.names)} tokens, each good once and {text}; on its device ({ELSEWHERE}):"
        output.result(
            {"file": str(out), "invitations": len(made.names), **told},
            f"{said}\n  anabranch client APP --server HOST:7070 --token-file FILE --ca-sha256 {sha256}",
        )
    elif alone:
        (name,), (token,) = made.names, made.tokens
        output.result(
            {"name": name, "token": token, **told},
            f"a token for {name}, good once and {text}; on the device ({ELSEWHERE}):\n"
            f"  anabranch client APP --server HOST:7070 --token {token} --ca-sha256 {sha256}",
        )
    else:
        for name, token in zip(made.names, made.tokens, strict=True):
            output.event("invitation", f"{name},{token}", name=name, token=token, **told)


def invitations(
    withdraw: Annotated[
        list[str] | None,
        typer.Option("--withdraw", help="Let the open tokens of this name count no more; may be repeated."),
    ] = None,
    expired: Annotated[
        bool, typer.Option("--withdraw-expired", help="Strike those that have expired off the list.")
    ] = False,
    everyone: Annotated[bool, typer.Option("--withdraw-all", help="Withdraw all of them.")] = False,
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """List the tokens that nobody has used yet, or withdraw some.

    A device that has joined stays: that is `anabranch admin revoke`.
    """
    output = Output(as_json)
    with Authority.open(folder) as authority:
        found, now = authority.invitations(), authority.now()
        if withdraw or expired or everyone:
            if unknown := set(withdraw or ()) - {i.name for i in found}:
                raise ConfigError(f"{min(unknown)!r} has no open token: see `{_of('invitations', folder)}`")
            named, old = set(withdraw or ()), now if expired else 0.0
            gone = [i for i in found if everyone or i.name in named or i.expires_at <= old]
            count = authority.withdraw(gone)
            output.result({"withdrawn": count}, f"withdrawn: {count}")
            return
    states = ["expired" if i.expires_at <= now else "open" for i in found]
    for i, state in zip(found, states, strict=True):
        output.event("invitation", "", name=i.name, state=state, expires_at_s=i.expires_at)
    cells = [[i.name, state, time_text(i.expires_at)] for i, state in zip(found, states, strict=True)]
    output.table("", ["name", "token", "until"], cells)


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
    _check_valid(valid_s)
    out = out or Path(name)
    if read_wallet(out) is not None:
        raise ConfigError(f"{out} has an identity already: name another folder with --out")
    with Authority.open(folder) as authority:
        key = new_key()
        made = authority.operator(name, key.public_key(), valid_s)
        wallet, ending = Wallet(out, key, made, authority.certificate), authority.ending()
        wallet.save()
    until, output = wallet.peer.not_after, Output(as_json)
    output.result(
        {"name": name, "folder": str(out), "expires_at_s": until},
        f"{out}: operator {name}, until {time_text(until)}; use it with:\n"
        f"  anabranch admin status --admin HOST:7071 --identity {out}",
    )
    _tell_ending(output, ending)


def revoke(name: Name, folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Shut a device or an operator out, from its next call on; its unused tokens as well."""
    with Authority.open(folder) as authority:
        count = authority.revoke(name)
    if not count:
        raise ConfigError(f"{name!r} has no certificate or token that counts: see `{_of('members', folder)}`")
    Output(as_json).result({"name": name, "revoked": count}, f"{name} is revoked")


def members(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """List everybody who has had a certificate."""
    with Authority.open(folder) as authority:
        found, now = authority.members(), authority.now()
        ending = authority.ending()
    output, cells = Output(as_json), []
    for m in found:
        state = "revoked" if m.revoked else "expired" if m.expires_at <= now else "good"
        output.event("member", "", name=m.name, member=m.kind, state=state, expires_at_s=m.expires_at)
        cells.append([m.name, m.kind, state, time_text(m.expires_at)])
    output.table("", ["name", "is", "certificate", "until"], cells)
    _tell_ending(output, ending)
