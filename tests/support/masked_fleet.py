"""A server, its keepers and its devices, each a process of its own that may be killed and started again."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from commands import anabranch, answer
from nursery import COMMAND, PIPE, Process
from ports import free_port

RUN = """
[run]
name = "masked"
workload = "{app}"
seed = 3
versions_max = {versions}
[fleet]
clients = {devices}
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = {devices}
[secagg]
mode = "keeper"
keepers = {names}
clip = 1.0
cohort_min = {devices}
[server]
address = "127.0.0.1:{device_port}"
admin_address = "127.0.0.1:{admin_port}"
data_dir = "data"
keepers = {addresses}
lease_min_s = 60.0
retry_after_min_s = 0.05
retry_after_max_s = 0.2
[identity]
tls = "always"
join_address = "127.0.0.1:{join_port}"
"""
DYING = Path(__file__).with_name("dying_command.py")
LYING = Path(__file__).with_name("lying_command.py")
LYING_SERVER = Path(__file__).with_name("lying_server.py")
SERVE = ("server", "run.toml", "--model", "model", "--json")
STARTED = ('{"kind": "serving"', '{"kind": "standby"')
LOOK_S = 0.1


class MaskedFleet:
    """As its user sets it up: `folder` is everybody's, and each has a part of it. It ends with its stack."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        devices: int = 4,
        keepers: int = 2,
        versions: int = 3,
        app: str = "synthetic",
    ) -> None:
        self.folder, self._stack, self.devices, self.app = folder, stack, devices, app
        self.ca_sha256 = answer(anabranch(folder, "admin", "ca", "init", "--json"))["ca_sha256"]
        answer(anabranch(folder, "admin", "operator", "alice", "--json"))
        answer(anabranch(folder, "init", app, "--out", "model", "--json"))
        ca = folder / "anabranch-identity" / "ca.pem"
        made = ("--ca", ca, "--cohort-min", devices, "--json")
        self.names = [
            answer(anabranch(folder, "keeper", "init", *made, "--folder", f"keeper-{i}"))["keeper"]
            for i in range(keepers)
        ]
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(keepers)]
        ports = {name: free_port() for name in ("device_port", "admin_port", "join_port")}
        self.address, self.admin, self.join = (f"127.0.0.1:{port}" for port in ports.values())
        # The addresses are in another order than the names: who is who, the certificates say.
        words = {"names": self.names, "addresses": self.addresses[::-1], "versions": versions}
        text = RUN.format(app=app, devices=devices, **words, **ports).replace("'", '"')
        (folder / "run.toml").write_text(text)
        self._tokens: dict[str, str] = {}

    def server(self, die_at: str = "", *words: object) -> Process:
        """The server, once it serves; with `die_at` it ends at that failpoint."""
        program = [DYING, die_at] if die_at else [COMMAND]
        return self._started("server", *program, *SERVE, *words)

    def lying(self, device: str) -> Process:
        """A server that gives one device the versions as they are, and to the others models of its own."""
        return self._started("server", LYING_SERVER, device, *SERVE)

    def standby(self, *words: object) -> Process:
        """Another server, with data of its own, once it stands by. Operators ask it from now on."""
        address, self.admin, join = (f"127.0.0.1:{free_port()}" for _ in range(3))
        own = ("--address", address, "--admin-address", self.admin, "--data-dir", "standby-data")
        process = self._started(
            "standby", COMMAND, *SERVE, *own, "--set", f"identity.join_address={join}", *words
        )
        self.address, self.join = f"{self.address},{address}", f"{self.join},{join}"
        return process

    def dying(self, die_at: str, *settings: str) -> Process:
        """A server that ends at a failpoint, be it before it serves."""
        given = [word for setting in settings for word in ("--set", setting)]
        return self._begun("server", DYING, die_at, *SERVE, *given)

    def keeper(self, number: int) -> Process:
        """A keeper, once it serves."""
        words = ("--folder", f"keeper-{number}", "--listen", self.addresses[number], "--json")
        return self._started(f"keeper-{number}", COMMAND, "keeper", "serve", *words)

    def device(self, number: int, *more: object, program: str | Path = COMMAND) -> Process:
        """A device, which was told the keepers by their people."""
        name = f"device-{number}"
        if name not in self._tokens:
            self._tokens[name] = answer(anabranch(self.folder, "admin", "enrol", name, "--json"))["token"]
        where = ("--server", self.address, "--join", self.join, "--ca-sha256", self.ca_sha256)
        keepers = more or [word for keeper in self.names for word in ("--keeper", keeper)]
        papers = ("--token", self._tokens[name], "--state-dir", name)
        return self._begun(name, program, "client", self.app, *where, *papers, *keepers, "--json")

    def status(self) -> dict[str, Any]:
        """What an operator sees."""
        papers = ("--admin", self.admin, "--identity", "alice")
        return answer(anabranch(self.folder, "admin", "status", *papers, "--json"))

    def until(self, key: str, least: int) -> dict[str, Any]:
        """Wait until so many sums wait (`waiting`), or a number of the status is so high."""
        while True:
            found = self.status()
            if (len(found["masked_sums"][key]) if key == "waiting" else found[key]) >= least:
                return found
            time.sleep(LOOK_S)

    def said(self, name: str) -> str:
        """What somebody has said on standard error."""
        return (self.folder / f"{name}.log").read_text()

    def _started(self, name: str, *words: object) -> Process:
        process = self._begun(name, *words, stdout=PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()  # or an error, which is a line too
        assert line.startswith(STARTED), line + self.said(name)
        return process

    def _begun(self, name: str, *words: object, stdout: int | None = None) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = Process(*words, cwd=self.folder, stdout=stdout or log, stderr=log)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process
