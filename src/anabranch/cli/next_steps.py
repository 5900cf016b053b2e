"""What to do when a run has ended: command lines that work as they stand, where the run was started.

They are printed without remarks on their own lines, as not every shell knows comments at its prompt.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import Path

from anabranch.core.config.secrets import masked
from anabranch.core.config.tables import Config
from anabranch.identity.addresses import host_and_port, is_loopback
from anabranch.reports.folders import holds_run
from anabranch.reports.models import BEST, FINAL

OPERATOR = "operator"  # the name and the folder of papers, for somebody who has none yet


def with_commands(text: str, commands: Sequence[str]) -> str:
    """The text, and each command on a line of its own."""
    return "\n".join([text, *(f"  {command}" for command in commands)])


def while_served(config: Config, admin_address: str, insecure: bool, best: bool) -> list[str]:
    """How to take the model out of a server whose run has ended; `best`: a version was measured."""
    from anabranch.identity.wallet import read_wallet
    from anabranch.server.tls import uses_tls

    address = _reached(admin_address)
    commands, words = [], ["--admin", address]
    if uses_tls(config.server.admin_address, config, insecure):
        words += ["--identity", OPERATOR]
        if read_wallet(Path(OPERATOR)) is None:
            commands.append(command_line("admin", "operator", OPERATOR, "--folder", config.identity.folder))
    elif not is_loopback(address):
        words.append("--insecure")
    which = ["--best", BEST] if best else [FINAL]
    return [*commands, command_line("admin", "export", *which, *words)]


def once_stopped(config: Config) -> list[str]:
    """What can be made of a server's data; a password of the database is masked, and to be put in."""
    words = [config.server.data_dir]
    if config.server.database:
        words += ["--database", masked(config.server.database)]
    return [command_line("report", *words), command_line("verify", *words)]


def with_run(folder: Path, code: bool = False) -> list[str]:
    """What can be made of a run's folder: with the other runs beside it, where there are some.

    `code`: the run names code of one's own.
    """
    beside = [other for other in folder.parent.iterdir() if not other.name.startswith(".")]
    all_runs = len(beside) > 1 and all(holds_run(other) for other in beside)
    compare = [f"{command_line('compare', folder.parent)}/*"] if all_runs else []
    return [command_line("replay", folder, *(["--load-code"] if code else [])), *compare]


def with_state(folder: Path, ended: bool) -> str:
    """What becomes of a device's folder: `ended` if the run is over, else it is to go on."""
    where = shlex.quote(str(folder))
    if ended:
        return (
            f"{where} is not needed any more: keep it to take part as the same device in the next run, or in"
            " this one if it goes on, or delete it"
        )
    return (
        f"start it again and it goes on: {where} has what is not sent yet, and who it is;"
        " delete that only if the device is not to come back"
    )


def resume_command(words: Sequence[str], folder: Path) -> str:
    """The command line that goes on with a run, of the one that it was started with."""
    given = list(words[1:])
    more = [] if any(word.partition("=")[0] == "--out" for word in given) else ["--out", str(folder)]
    return command_line(*given, *more, *([] if "--resume" in given else ["--resume"]))


def _reached(address: str) -> str:
    """Where a port on this machine is called, of one that may listen on every address."""
    host, port = host_and_port(address)
    try:
        given = ipaddress.ip_address(host)
    except ValueError:
        return address
    if not given.is_unspecified:
        return address
    return f"127.0.0.1:{port}" if given.version == 4 else f"[::1]:{port}"


def command_line(*words: str | Path) -> str:
    """A command as it is typed, whatever is in the names of its files."""
    return shlex.join(["anabranch", *map(str, words)])
