"""The processes of a demo: a server, devices and an evaluator, each with a log of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from anabranch.api.configuration import secrets_environment
from anabranch.core.config.tables import Config
from anabranch.core.errors import Unavailable
from anabranch.workloads.profiles import speed_profile

SERVER_READY_S = 60.0
STOP_S = 30.0

Addresses = tuple[str, str]


class FleetProcesses:
    """Starts processes under `folder` and stops what still runs when left; a context manager."""

    def __init__(self, folder: Path, settings: Config, app: str) -> None:
        self.folder = folder
        self.settings = settings
        self._app = [app, "--data-path", settings.run.data_path]
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self) -> Addresses:
        """Initialise the model, start the server, wait until it serves; returns its addresses."""
        settings, config = self.settings, self.folder / "config.json"
        config.write_text(json.dumps(settings.to_json(), indent=2), encoding="utf-8")
        model = self.folder / "model"
        of_model = ["--out", str(model), "--seed", str(settings.run.seed), *self._app[1:]]
        self._wait(self._start("init", ["init", str(config), *of_model], secrets_environment(settings)))
        data = ["--data-dir", str(self.folder / "server")]
        command = ["server", str(config), "--model", str(model), *data, "--json"]
        self._start("server", command, secrets_environment(settings))
        return self._serving()

    def start_devices(self, addresses: Addresses, clients: int) -> None:
        """Start the evaluator and the devices; each emulates the speed of its level, and is as narrow."""
        server, admin = addresses
        self._start("evaluator", ["evaluate", *self._app, "--server", server, "--admin", admin, "--json"])
        profiles = speed_profile(self.settings.fleet, self.settings.run.seed)
        steps, widths = profiles.step_time_s, profiles.width_max
        for i in range(clients):
            state = self.folder / "devices" / str(i)
            arguments = ["--server", server, "--shard", f"{i}/{clients}", "--state-dir", str(state)]
            pace = ["--step-time", f"{steps[i]:.6f}", "--width-max", f"{widths[i]}", "--threads", "1"]
            self._start(
                f"device-{i}", ["client", *self._app, *arguments, "--id", f"device-{i}", *pace, "--json"]
            )

    def check(self) -> None:
        """Raises `Unavailable` if the server, or every device, has died."""
        dead = [n for n, p in self._running.items() if p.poll() not in (None, 0)]
        devices = [n for n in self._running if n.startswith("device-")]
        if "server" in dead or (devices and set(devices) <= set(dead)):
            name = "server" if "server" in dead else devices[0]
            raise Unavailable(f"{name} has died; the end of {self.logs / name}.log:\n{self._tail(name)}")

    def evaluator_ended(self) -> bool:
        """Whether the evaluator has stopped by itself."""
        return self._running["evaluator"].poll() is not None

    def __enter__(self) -> FleetProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Devices first, so that the server drains without new work; it is waited for last.
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> str:
        # One thread each: many processes share few cores.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(more or {})}
        with (self.logs / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "anabranch.cli.main", *arguments]
            self._running[name] = subprocess.Popen(  # noqa: S603 - our own command line
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        return name

    def _wait(self, name: str) -> None:
        try:
            code = self._running[name].wait(SERVER_READY_S)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(
                f"{name} has not ended within {SERVER_READY_S:.0f} s:\n{self._tail(name)}"
            ) from error
        del self._running[name]
        if code:
            raise Unavailable(f"{name} failed:\n{self._tail(name)}")

    def _serving(self) -> Addresses:
        """The addresses that the server prints once it serves."""
        deadline = time.monotonic() + SERVER_READY_S
        while time.monotonic() < deadline:
            self.check()
            for line in (self.logs / "server.log").read_text(errors="replace").splitlines():
                if line.startswith('{"kind": "serving"'):
                    said = json.loads(line)
                    return said["address"], said["admin_address"]
            time.sleep(0.05)
        raise Unavailable(f"the server did not serve within {SERVER_READY_S:.0f} s:\n{self._tail('server')}")

    def _tail(self, name: str) -> str:
        return "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
