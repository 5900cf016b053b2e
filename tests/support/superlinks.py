"""A SuperLink of Flower's and SuperNodes, as processes of this machine, for `flwr run`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ports import free_port

BIN = Path(sys.executable).parent
READY_S, STOP_S = 600.0, 60.0


class Deployment:
    """Where `flwr run` finds the SuperLink, and where the processes' logs lie."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, dict(environment)

    def run(self, app: Path, timeout_s: float) -> str:
        """Run an app to its end; returns what was streamed of it."""
        command = [str(BIN / "flwr"), "run", str(app), "here", "--stream"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder
        )
        said = str(done.stdout + done.stderr)
        assert done.returncode == 0, said + self.logs()
        return said

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))


@contextmanager
def deployed(folder: Path, nodes: int, simulated: bool = False) -> Iterator[Deployment]:
    """A SuperLink with so many SuperNodes, each with its partition; or one that simulates them."""
    home = folder / "home"
    home.mkdir(parents=True)
    port = free_port()
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        + (f"options.num-supernodes = {nodes}\n" if simulated else "")
    )
    with ExitStack() as stack:
        link = [
            "flower-superlink",
            "--insecure",
            "--port",
            str(port),
            "--disable-runtime-dependency-installation",
        ]
        stack.enter_context(
            _process(folder, "superlink", [*link, *(["--simulation"] if simulated else [])], environment)
        )
        _await_port(port)
        for i in range(0 if simulated else nodes):
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            config = [
                "--node-config",
                f"partition-id={i} num-partitions={nodes}",
                "--port",
                str(free_port()),
            ]
            stack.enter_context(_process(folder, f"supernode-{i}", [*node, *config], environment))
        yield Deployment(folder, environment)


@contextmanager
def _process(folder: Path, name: str, command: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    """A process in a group of its own: Flower's start others."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [BIN / command[0], *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):  # those that it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def _await_port(port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"the SuperLink did not listen on port {port} within {READY_S:.0f} s")
