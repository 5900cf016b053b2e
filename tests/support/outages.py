"""A server of a model's folder that is killed and comes back, and how often each update counted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from commands import anabranch, answer, killable, killable_saying
from ports import free_port

from anabranch.api.participation import JoinOptions

OPTIONS = (
    *("--strategy", "fedasync", "--set", "server.lease_min_s=1"),
    *("--data-dir", "data", "--admin-address", "127.0.0.1:0"),
)


@dataclass
class Outage:
    """`address`: of the server; `kill` ends it at once, and another process goes on with its data.

    `papers`: what a device of a guarded server joins with, as the API calls it.
    """

    address: str
    kill: Callable[[], None]
    papers: JoinOptions
    ended: list[int] = field(default_factory=list)  # by which signal


@contextmanager
def outage(folder: Path, model: str, updates: int, guarded: str = "") -> Iterator[Outage]:
    """Serve the model of an App's name for so many updates, with `kill` at hand.

    `guarded`: with mutual TLS, to which the device of this name is invited.
    """
    answer(anabranch(folder, "init", model, "--json"))
    address, join = (f"127.0.0.1:{free_port()}" for _ in range(2))
    options: tuple[object, ...] = (*OPTIONS, "--address", address, "--updates", updates)
    if guarded:
        answer(anabranch(folder, "admin", "ca", "init", "--json"))
        options += ("--set", 'identity.tls="always"', "--set", f"identity.join_address={join}")
    with ExitStack() as stack:
        said, first = stack.enter_context(killable_saying(folder, *options))
        papers = JoinOptions()
        if guarded:
            token = answer(anabranch(folder, "admin", "enrol", guarded, "--json"))["token"]
            papers = JoinOptions(token=token, ca_sha256=said["ca_sha256"], join=said["join_address"])
        again = Thread(target=lambda: stack.enter_context(killable(folder, *options)))

        def kill() -> None:
            first.send_signal(signal.SIGKILL)
            found.ended.append(-first.wait(600))
            again.start()

        found = Outage(address, kill, papers)
        yield found
        again.join(600)
    assert found.ended == [signal.SIGKILL]


def counted(folder: Path) -> dict[str, int]:
    """Updates that count by the server's log, of each device."""
    answer(anabranch(folder, "verify", "data", "--json"))
    result = answer(anabranch(folder, "report", "data", "--out", "run", "--json"))
    return {device: share["updates"] for device, share in result["clients"].items()}
