"""The command line. Every command ends with an exit code of `core.errors.OUTCOMES`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

import anabranch
from anabranch.cli.admin import admin_app, config_app, health
from anabranch.cli.demo import demo
from anabranch.cli.flower import flower_app
from anabranch.cli.live import client, evaluate, init, server
from anabranch.cli.runs import compare, replay, report, verify
from anabranch.cli.search import search
from anabranch.cli.simulate import simulate
from anabranch.core.errors import AnabranchError, outcome_of

app = typer.Typer(
    name="anabranch",
    help="Asynchronous federated learning for real fleets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        Console().print(f"anabranch {anabranch.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Asynchronous federated learning for real fleets."""


for command in (
    demo,
    simulate,
    search,
    init,
    server,
    client,
    evaluate,
    compare,
    report,
    replay,
    verify,
    health,
):
    app.command()(command)
app.add_typer(config_app, name="config")
app.add_typer(admin_app, name="admin")
app.add_typer(flower_app, name="flower")


def main() -> None:
    """Run a command; a deliberate error becomes one line on stderr and its exit code."""
    try:
        app()
    except AnabranchError as error:
        if "--json" in sys.argv:
            sys.stdout.write(
                json.dumps({"kind": "error", "error": type(error).__name__, "detail": str(error)}) + "\n"
            )
        Console(stderr=True, highlight=False).print(
            f"error: {error}", style="red", markup=False, soft_wrap=True
        )
        sys.exit(outcome_of(error).exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
