"""The commands. Every one ends with an exit code of `core.errors.OUTCOMES`."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

import anabranch
from anabranch.cli.main import INTERRUPTED
from anabranch.cli.output import STDERR, STDOUT, answers, json_line, silence
from anabranch.core.config.extras import how_to_install
from anabranch.core.config.secrets import masked_text
from anabranch.core.errors import (
    NO_SPACE,
    AnabranchError,
    ConfigError,
    FolderMissing,
    StoreError,
    TooLarge,
    disk_error,
    outcome_of,
)
from anabranch.core.text import LAYOUT, visible
from anabranch.support.heap import uncollected

HELP = "--help"
NO_THREAD = "can't start new thread"  # the interpreter's own words

# Of each command or group of commands its module and its line in the list of all, in their order there. The
# lines are those of the modules: to import all of them takes a second.
COMMANDS = {
    "demo": ("demo", "Run a whole federation on this machine: a server, unequal devices, an evaluator."),
    "simulate": ("simulate", "Simulate a fleet: the same engine and devices as live, on a virtual clock."),
    "calibrate": (
        "calibrating",
        "Measure the devices of a run by its log, and write a simulated fleet like them.",
    ),
    "trace": ("traces", "Read a trace and say what is in it; with a source, write it first."),
    "tune": (
        "tune",
        "Tune a run: learning rate, steps, buffer, mixing, staleness and compression, in the simulator.",
    ),
    "search": (
        "search",
        "Search kept fraction and bits for `teasq`: short simulated runs, judged on the validation part.",
    ),
    "new": (
        "creating",
        "Make a folder with an App, settings, tests and a README: to run as it is, and to put your own into.",
    ),
    "check": (
        "check",
        "Check an App: build it, train it, restart, export, reload and measure it; say what will not work.",
    ),
    "init": (
        "initialise",
        "Write the manifest and the first weights of an App's model, for a server to start from.",
    ),
    "server": (
        "live",
        "Serve a federation until its budget is used up and an operator stops it (SIGTERM drains).",
    ),
    "client": ("live", "Run a device: ask, train on local data, push, again; until the run ends or SIGTERM."),
    "keeper": ("keeper", "Take masks off sums of updates, as another party than the server's."),
    "bundle": ("bundles", "The code of an App as a signed file, for devices."),
    "evaluate": (
        "live",
        "Follow a run: fetch each new version as any device does, and measure it on held-out data.",
    ),
    "compare": ("runs", "Put runs side by side: a table, and a page with their curves over each other."),
    "report": ("runs", "Write report.html: again from a run's result.json, or first from a server's data."),
    "replay": ("runs", "Replay a run's journal through a fresh engine and compare the digests."),
    "verify": (
        "runs",
        "Check every invariant of a server's data: log, blobs, a replay, digests, signatures.",
    ),
    "ui": (
        "cockpit",
        "Look at runs in a browser: finished ones, and those that are under way, live or simulated.",
    ),
    "health": ("health", "Ask a server whether it serves; exit code 0 if it does."),
    "config": ("admin", "Look at configurations."),
    "admin": ("admin", "Look after a running server, through its operators' port."),
    "flower": ("flower", "Flower apps on Flower's own runtime."),
}


class _Commands(TyperGroup):
    """Loads a command when it runs, and says in one line that it was interrupted.

    Click's classes are not named here: later releases of typer carry their own.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """As the list shows it."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.commands[cmd_name] = TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])
        return self.commands.get(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """`help COMMAND` is `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], HELP] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As it runs."""
        for name in COMMANDS:  # among which a near one is looked for, where a name is none
            self.get_command(ctx, name)
        if args[0] in COMMANDS:
            _check_directory()
            self.commands[args[0]] = loaded(args[0])
        *found, rest = super().resolve_command(ctx, args)
        if rest[:1] == ["help"] and hasattr(found[1], "commands"):  # `admin help status`
            rest = [*rest[1:], HELP]
        return *found, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            said = ": ".join(["interrupted", *getattr(stop, "__notes__", ())])
            Console(stderr=True, highlight=False).print(said, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            _guess_once(error)
            raise


def _guess_once(error: Exception) -> None:
    """What a word that is none may have meant; nobody is led into the clear by a guess at `--server`."""
    said = vars(error)
    if "Did you mean" in said.get("message", ""):  # typer's, which click 8.4 would say again
        said["possibilities"] = None
    elif said.get("possibilities") and not said.get("option_name", "").startswith("--i"):
        said["possibilities"] = [guess for guess in said["possibilities"] if guess != "--insecure"]


app = typer.Typer(
    name="anabranch",
    cls=_Commands,
    help="Asynchronous federated learning for real fleets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", HELP]},
)


def _version(show: bool) -> None:
    if show:
        Console().print(f"anabranch {anabranch.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Asynchronous federated learning for real fleets."""


def _check_directory() -> None:
    """Raises `FolderMissing` where nothing could be found: libraries that are imported end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise FolderMissing("the working directory is not there any more: `cd` to one that is") from error


def loaded(name: str) -> Any:
    """A command, or a group of them, from its module. Importing all of them takes longer than most run."""
    with uncollected():  # from `main` on
        module = import_module(f"anabranch.cli.{COMMANDS[name][0]}")
    group, holder = getattr(module, f"{name}_app", None), typer.Typer()
    if group:
        holder.add_typer(group, name=name)
    else:
        holder.command(name)(getattr(module, name))
    command = typer.main.get_group(holder).commands[name]
    _unwrap(command)
    return command


def _unwrap(command: Any) -> None:
    """Let help fill the terminal's lines: typer keeps those of the source, but for the first paragraph."""
    if command.help:
        command.help = "\n\n".join(" ".join(text.split()) for text in command.help.split("\n\n"))
    for inner in getattr(command, "commands", {}).values():
        _unwrap(inner)


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
        if error.filename is None and error.errno not in (*NO_SPACE, errno.ENOENT):
            raise
        return _said(_of_disk(error))
    except Exception as error:
        if (found := _of_limits(error) or _of_part(error)) is None:
            raise
        return _said(found)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _of_disk(error: OSError) -> StoreError:
    """What the operating system says of a file."""
    from anabranch.identity.files import whose  # here, as no command waits for it

    if isinstance(error.filename, str):
        return disk_error(error.filename, error, whose(Path(error.filename), error))
    what = "the folder for temporary files" if error.errno == errno.ENOENT else "what was written"
    return disk_error(error.filename or what, error)


def _of_part(error: Exception) -> AnabranchError | None:
    """What an error is where a part of one's own has raised it, such as a server's strategy."""
    from anabranch.core.parts import kinds  # here, as no command waits for them
    from anabranch.support.own_parts import told_part

    for kind in kinds():
        if (found := told_part(error, (kind,))) is not None:
            # What a store cannot do now it may after a restart; other code fails again.
            return StoreError(str(found)) if kind.word == "store" else found
    return None


def _of_limits(error: Exception) -> TooLarge | None:
    """What it is where the process may have no more: nothing that a traceback would tell of."""
    if str(error) == NO_THREAD:
        mend = "allow more processes (ulimit -u, or the service's or the container's own limit)"
        return TooLarge(f"no more threads may be started: {mend}")
    if not isinstance(error, MemoryError):
        return None
    return TooLarge(f"no memory: {error}: give the process more, or take a smaller model or smaller batches")


def _said(error: AnabranchError) -> int:
    """The exit code of an error that was told: one line on stderr, and on stdout for programs."""
    if isinstance(error, StoreError):  # files that cannot be closed, as they are let go: it is said here
        sys.unraisablehook = lambda _: None
    text = masked_text(str(error))
    if "--json" in sys.argv:
        with _heard_or_not(STDOUT):
            answers().write(json_line({"kind": "error", "error": type(error).__name__, "detail": text}))
            answers().flush()
    if (logs := sys.modules.get("anabranch.cli.logs")) is not None and logs.is_json():
        logs.log.error("%s", text)  # whoever reads a server's stderr line by line can read this one, too
        return outcome_of(error).exit_code
    console, line = Console(stderr=True, highlight=False, emoji=False), visible(f"error: {text}", LAYOUT)
    with _heard_or_not(STDERR):
        console.print(line, style="red", markup=False, soft_wrap=True)
    return outcome_of(error).exit_code


@contextmanager
def _heard_or_not(stream: int) -> Iterator[None]:
    """Its reader may have gone, or its disk be full: the other stream and the exit code say what is wrong."""
    try:
        yield
    except OSError:
        silence(stream)


def _masked_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """A bug is told whole, but for passwords."""
    sys.stderr.write(masked_text("".join(traceback.format_exception(kind, error, frames))))
