"""The commands. Every one ends with an exit code of `core.errors.OUTCOMES`."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import anabranch
from anabranch.cli.main import INTERRUPTED
from anabranch.cli.output import json_line
from anabranch.core.config.extras import how_to_install
from anabranch.core.config.secrets import masked_text
from anabranch.core.errors import NO_SPACE, AnabranchError, ConfigError, StoreError, disk_error, outcome_of
from anabranch.core.text import LAYOUT, visible

# The module of each command or group of commands, in the order in which help lists them.
MODULES = {
    "demo": "demo",
    "simulate": "simulate",
    "calibrate": "calibrating",
    "trace": "traces",
    "tune": "tune",
    "search": "search",
    "new": "creating",
    "check": "check",
    "init": "initialise",
    "server": "live",
    "client": "live",
    "keeper": "keeper",
    "bundle": "bundles",
    "evaluate": "live",
    "compare": "runs",
    "report": "runs",
    "replay": "runs",
    "verify": "runs",
    "ui": "cockpit",
    "health": "admin",
    "config": "admin",
    "admin": "admin",
    "flower": "flower",
}


class _Commands(TyperGroup):
    """Loads a command when it is asked for, and says in one line that it was interrupted.

    Click's classes are not named here: later releases of typer carry their own.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        # Of a name that is none, a near one is looked for among all.
        for name in [cmd_name] if cmd_name in MODULES else MODULES:
            if name not in self.commands:
                self.commands[name] = _loaded(name)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="anabranch",
    cls=_Commands,
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


def _loaded(name: str) -> Any:
    """A command, or a group of them, from its module. Importing all of them takes longer than most run."""
    module = import_module(f"anabranch.cli.{MODULES[name]}")
    group, holder = getattr(module, f"{name}_app", None), typer.Typer()
    if group:
        holder.add_typer(group, name=name)
    else:
        holder.command(name)(getattr(module, name))
    return typer.main.get_group(holder).commands[name]


def run() -> int:
    """Run a command; returns its exit code. What was foreseen becomes one line on stderr."""
    sys.excepthook = _masked_traceback
    try:
        app()
    except AnabranchError as error:
        return _said(error)
    except ModuleNotFoundError as error:
        if not (command := how_to_install(error.name)):
            raise
        return _said(ConfigError(f"{error.name} is not installed, and this command needs it: {command}"))
    except OSError as error:
        if error.filename is None and error.errno not in NO_SPACE:
            raise
        return _said(disk_error(error.filename or "what was written", error))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _said(error: AnabranchError) -> int:
    """The exit code of an error that was told: one line on stderr, and on stdout for programs."""
    if isinstance(error, StoreError):  # files that cannot be closed, as they are let go: it is said here
        sys.unraisablehook = lambda _: None
    text = masked_text(str(error))
    if "--json" in sys.argv:
        sys.stdout.write(json_line({"kind": "error", "error": type(error).__name__, "detail": text}))
    console, line = Console(stderr=True, highlight=False), visible(f"error: {text}", LAYOUT)
    console.print(line, style="red", markup=False, soft_wrap=True)
    return outcome_of(error).exit_code


def _masked_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """A bug is told whole, but for passwords."""
    sys.stderr.write(masked_text("".join(traceback.format_exception(kind, error, frames))))
