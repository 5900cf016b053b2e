"""The processes of the soak, which are killed and started again: a server on its small disk, and devices."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import soak_device
import soak_server
from nursery import Process
from ports import free_port
from server_process import NotServing, Plan, ServerProcess
from wire import SUM

STUCK_S = 1800.0  # without progress: a machine may be slow, but not that slow
# The log, and what the server remembers of updates that it has forgotten: small, so that both are soon full.
KEPT = "versions:100"
LIMITS = {"inline_bytes_max": 8192, "free_disk_bytes_min": 1, "receipts_max": 2000}
CERTIFICATE_S = 3600.0  # renewed after two thirds of it


class SoakServer(ServerProcess):
    """A guarded server, whose machine's clock is set; `enter` puts it on the disk that it has its data on."""

    def __init__(self, folder: Path, enter: Sequence[str], data_dir: Path) -> None:
        super().__init__(folder, Plan(), data_dir=data_dir)
        self.folder, self.admin, self.join = folder, *(f"127.0.0.1:{free_port()}" for _ in range(2))
        self.seen_data_dir = folder / "disk" / "data"  # as it sees it
        tables = {
            "strategy": SUM,
            "client": {"steps": 2},
            "limits": LIMITS,
            "identity": {
                "folder": str(folder / "ca"),
                "tls": "always",
                "join_address": self.join,
                "certificate_s": CERTIFICATE_S,
            },
            "server": {
                "address": self.address,
                "admin_address": self.admin,
                "data_dir": str(self.seen_data_dir),
                "drain_s": 5.0,
                "keep": KEPT,
                "lease_s": 10.0,
                "lease_min_s": 5.0,
                "retry_after_min_s": 0.05,
                "retry_after_max_s": 0.5,
            },
        }
        config = folder / "config.json"
        config.write_text(json.dumps(tables))
        self._program, self._enter = [soak_server.__file__], list(enter)
        self._arguments = [str(config), str(folder / "model")]

    def await_health(self, status: int) -> None:
        """Wait until it says itself that it serves. Raises `NotServing`."""
        began, told = time.monotonic(), self.folder / soak_server.SERVING
        while self.lives and time.monotonic() - began < STUCK_S:
            if told.exists() and told.read_text() == str(self.pid):
                return
            time.sleep(0.02)
        raise NotServing(f"the server does not serve; its log ends:\n{self.log_tail()}")

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def set_clock(self, ahead_s: float) -> None:
        """Let the clock of its machine be ahead, or behind."""
        file = self.folder / soak_server.CLOCK
        file.with_suffix(".new").write_text(str(ahead_s))
        file.with_suffix(".new").replace(file)


class DeviceProcess:
    """A device, or the process of a copy of its folder, with notes of its own.

    `joining`: those of `ClientOptions` that it joins with.
    """

    def __init__(self, state_dir: Path, address: str, joining: Mapping[str, str]) -> None:
        self.state_dir, self.address, self.joining = state_dir, address, joining
        self._notes, self._read_bytes = state_dir.with_suffix(".notes"), 0
        self._log = state_dir.with_suffix(".log")
        self._process: Process | None = None
        self._bases: dict[str, int] = {}  # of what it has made, until it is answered
        self.answers = 0
        self.heard_at = self.failed_at = 0.0  # when a call came to something last, and to nothing; monotonic
        self.newest_base = 0  # of what was applied since the server's data were put back the last time
        self.discarded = 0  # how often it was told of that, and went on

    def start(self, tasks_max: int = 0) -> None:
        """Start, without waiting."""
        words = [self.address, json.dumps(self.joining), self.state_dir, self._notes, tasks_max]
        with self._log.open("ab") as log:
            self._process = Process(soak_device.__file__, *words, stdout=log, stderr=log)

    def copied(self, folder: Path) -> DeviceProcess:
        """One with a copy of its folder."""
        return DeviceProcess(shutil.copytree(self.state_dir, folder), self.address, self.joining)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def ended(self) -> int:
        """The exit code, once it ends by itself."""
        assert self._process is not None
        return self._process.wait(STUCK_S)

    def results(self) -> int:
        """How many are in its outbox."""
        return len(list((self.state_dir / "outbox").glob("*.update")))

    def news(self) -> Iterator[dict[str, Any]]:
        """The whole lines of its notes since the last time."""
        if not self._notes.exists():
            return
        with self._notes.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            try:
                note: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                continue  # a kill cut it short
            self._take(note)
            yield note

    def log_tail(self) -> str:
        """The last that it wrote."""
        return self._log.read_text(errors="replace")[-2_000:]

    def _take(self, note: dict[str, Any]) -> None:
        match note["kind"]:
            case "made":
                self._bases[note["update"]] = note["base"]
            case "pushed":
                self.answers += 1
                base = self._bases.pop(note["update"], 0)
                if note["verdict"] != "rejected":
                    self.newest_base = max(self.newest_base, base)
                self.heard_at = note["at"]
            case "refused":
                self.heard_at = note["at"]
            case "failed":
                self.failed_at = note["at"]
            case "warned":
                self.discarded += "discarded, and the device goes on" in note["text"]
