"""What a start costs: a server's until its first answered call, and that of commands which end at once.

    python -m benchmarks.starts [PYTHON ...]

In processor time, of interpreters of their own, with compiled modules. Each PYTHON is one that has anabranch
installed, this one if none is named; they take turns, so that two releases have the same work beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anabranch.client.health import check_health
from anabranch.core.errors import OUTCOMES, Unavailable

ROUNDS = 5
ADDRESSES = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
NOWHERE = "127.0.0.1:1"  # nobody listens: the command says so
COMMANDS: dict[str, tuple[str, ...]] = {
    "`anabranch health`, no server there": ("health", NOWHERE),
    "`anabranch admin status --help`": ("admin", "status", "--help"),
    "`anabranch client --help`": ("client", "--help"),
    "`anabranch config show`": ("config", "show"),
}


def words(python: str, *arguments: object) -> list[str]:
    """A command of an installation, which sees nothing of the folder that it runs in."""
    return [python, "-P", "-m", "anabranch.cli.main", *map(str, arguments)]


def of_command(python: str, arguments: Sequence[str], folder: Path) -> float:
    """Milliseconds of processor time from start to end."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(words(python, *arguments), cwd=folder, stdout=null, stderr=null)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, OUTCOMES[Unavailable].exit_code):
        raise RuntimeError(f"{python}: {' '.join(arguments)} ended with {process.returncode}")
    return 1e3 * (used.ru_utime + used.ru_stime)


def of_server(python: str, folder: Path, data: Path) -> float:
    """The same of a server until it has answered a call; it is stopped then."""
    command = words(python, "server", "--model", folder / "model", "--data-dir", data, *ADDRESSES, "--json")
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert check_health(said["admin_address"])
        threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        used_ms = sum(int(path.read_text().split()[0]) for path in threads) / 1e6
        process.terminate()
    return used_ms


def one_round(python: str, folder: Path, data: Path) -> dict[str, float]:
    """All of it once, by what it is; `data` is a new folder's."""
    found = {
        "a server, the first start of its run": of_server(python, folder, data),
        "a server, a later start": of_server(python, folder, data),
    }
    return found | {name: of_command(python, its, folder) for name, its in COMMANDS.items()}


def main(pythons: Sequence[str]) -> None:
    """Print the table: medians, and the median of the rounds' ratios, last to first."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run(words(pythons[0], "init", "synthetic", "--out", "model"), cwd=folder, check=True)
        found: list[list[dict[str, float]]] = [[] for _ in pythons]
        turns = list(enumerate(pythons))
        for number in range(-1, ROUNDS):
            for place_of, python in turns if number % 2 else turns[::-1]:
                measured = one_round(python, folder, folder / f"data-{number}-{place_of}")
                if number >= 0:  # the first one compiles
                    found[place_of].append(measured)
    print("| what | " + " | ".join(f"{p}, ms" for p in pythons) + " | ratio |")
    print("|---" * (len(pythons) + 2) + "|")
    for name in found[0][0]:
        rows = [[measured[name] for measured in each] for each in found]
        ratio = statistics.median(last / first for first, last in zip(rows[0], rows[-1], strict=True))
        print(f"| {name} | " + " | ".join(f"{statistics.median(r):.0f}" for r in rows) + f" | {ratio:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
