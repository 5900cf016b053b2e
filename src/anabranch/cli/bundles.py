"""`bundle`: the code of an App as one signed file, from which devices that allow its signer have it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.options import AsJson, Force, file_to_write
from anabranch.cli.output import Output
from anabranch.reports.text import count_text

if TYPE_CHECKING:
    from anabranch.identity.bundle import Bundle

bundle_app = typer.Typer(help="The code of an App as a signed file, for devices.", no_args_is_help=True)

SIGNER_FILE, BUNDLE_FILE = Path("signer.key"), Path("app.bundle")

KeyFile = Annotated[Path, typer.Option("--key", help="What `anabranch bundle key` wrote.", metavar="FILE")]


@bundle_app.command("key")
def key(
    out: Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")] = SIGNER_FILE,
    as_json: AsJson = False,
) -> None:
    """Make a key to sign bundles with, for its owner alone, and print its signer: what devices allow."""
    from anabranch.identity.signers import make_signer

    signer = make_signer(out)
    text = (
        f"{out}: keep it to yourself, it runs code on every device that allows this signer\nsigner: {signer}"
    )
    Output(as_json).result({"key": str(out), "signer": signer}, text)


@bundle_app.command("make")
def make(
    app: Annotated[str, typer.Argument(help="path/to/file.py:App.", metavar="APP")],
    key: KeyFile = SIGNER_FILE,
    out: Annotated[
        Path | None,
        typer.Option("--out", help=f"The file to write; {BUNDLE_FILE} if not given.", metavar="FILE"),
    ] = None,
    force: Force = False,
    name: Annotated[str, typer.Option("--name", help="Its name; the file's if not given.")] = "",
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            help="More files from the App's folder, such as words.txt or data/*.csv. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(
            "--needs",
            help="A distribution that a device must have, beside those that are imported. Repeatable.",
            metavar="NAME",
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option("--python", help="The oldest that it runs on; this one's if not given.", metavar="X.Y"),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Sign the files of an App: its own, what that imports from its folder, and what --include names.

    It is then opened and imported once, as on a device.
    """
    from anabranch.api.bundles import make_bundle

    out = file_to_write(out, BUNDLE_FILE, force)
    made = make_bundle(app, key, out, name=name, include=include or (), needs=needs or (), python=python)
    Output(as_json).result({"bundle": str(out), **_facts(made)}, f"{out}: {_text(made)}")


@bundle_app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="The bundle.", metavar="FILE")],
    signers: Annotated[
        list[str] | None,
        typer.Option("--signer", help="Fail unless this one has signed it. Repeatable.", metavar="HEX"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say who has signed a bundle, and what is in it. Nothing of it is run, or written anywhere."""
    from anabranch.api.bundles import show_bundle

    found = show_bundle(file, signers)
    Output(as_json).result({"bundle": str(file), **_facts(found)}, f"{file}: {_text(found)}")


def _facts(bundle: Bundle) -> dict[str, Any]:
    return {"signer": bundle.signer, "sha256": bundle.sha256, **asdict(bundle.manifest)}


def _text(bundle: Bundle) -> str:
    manifest = bundle.manifest
    made = datetime.fromtimestamp(manifest.created_at, UTC).isoformat()
    lines = [
        f"{manifest.name}, {manifest.entry}, made {made}",
        f"signer: {bundle.signer}",
        f"sha256: {bundle.sha256}",
        f"needs: Python {manifest.requires_python}{''.join(f', {name}' for name in manifest.needs)}",
        *(f"  {count_text(file.size_bytes):>9}  {file.path}" for file in manifest.files),
    ]
    return "\n".join(lines)
