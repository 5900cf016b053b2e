"""The cockpit of a server, in a process of its own: it ends with the server, and the server outlives it."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import threading
from pathlib import Path

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import ConfigError
from anabranch.identity.addresses import host_and_port, is_loopback

log = logging.getLogger(__name__)

END_S = 10.0
NEEDED = ("starlette", "uvicorn")
EVERY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - how it is reached


class CockpitProcess:
    """`anabranch ui` beside a server. Raises `ConfigError` where it cannot be, before anything is served.

    It listens on loopback alone, and speaks to the operators' port with the papers in `identity`. It ends
    once this process lets go of its standard input, which the system sees to however this process ends.
    `answers`: the descriptor for its lines of JSON, if it is to speak to programs.
    """

    def __init__(self, listen: str, identity: Path | None, insecure: bool, answers: int | None) -> None:
        if not is_loopback(listen):
            raise ConfigError(
                f"--ui {listen}: a server's cockpit is for this machine: listen on 127.0.0.1, or run "
                "`anabranch ui --admin HOST:PORT --listen ... --tls-certificate ...` beside it"
            )
        for module in NEEDED:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"{module} is not installed, and --ui needs it: {how_to_install(module)}")
        self._words = ["--listen", listen, *(["--identity", str(identity)] if identity else [])]
        self._words += [*["--insecure"][: int(insecure)], *["--json"][: answers is not None]]
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False

    def start(self, admin_address: str) -> None:
        """Start it, now that the server serves operators there. What it prints is printed by this process."""
        host, port = host_and_port(admin_address)
        host = EVERY_HOST.get(host, host)
        admin = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        command = [sys.executable, "-m", "anabranch.cli.main", "ui", "--admin", admin, "--until-eof"]
        self._process = subprocess.Popen(  # noqa: S603 - a Ctrl-C in the terminal is the server's
            [*command, *self._words], stdin=subprocess.PIPE, stdout=self._answers, start_new_session=True
        )
        threading.Thread(target=self._mind, args=(self._process,), daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._closing = True
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _mind(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            log.warning(
                "the cockpit has ended (exit code %d), the server goes on: `anabranch ui --admin` is another",
                code,
            )
