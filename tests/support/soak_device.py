"""A device process of the soak: `python soak_device.py ADDRESS JOINING STATE_DIR NOTES TASKS_MAX`.

JOINING are the options that it joins with the first time, as a JSON object.

Each update is a delta of whole numbers that follows from one number, which is its first value; so who knows
the numbers can add up what the model must be. The device keeps notes of its own, a file of JSON lines:
each update that it has made, before it is sent; each answer; and what failed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import crash_device
import numpy as np
import numpy.typing as npt

from anabranch.client.outbox import UpdateEntry
from anabranch.client.run import ClientOptions, run_client
from anabranch.core.errors import AnabranchError, outcome_of
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples
from anabranch.workloads.batches import batches

SHAPE = (30, 100)
NUMBERS = 1 << 14
STEP_S = 0.02
TOLD = ("enrolled", "pushed", "refused", "failed", "cancelled", "stopped")


def delta_of(number: int) -> npt.NDArray[np.float32]:
    """The delta of a number from `-NUMBERS / 2` on: whole numbers, the first of them the number itself."""
    delta = np.random.default_rng(number + NUMBERS).integers(-8, 9, SHAPE).astype(np.float32)
    delta[0, 0] = number
    return delta


class App(crash_device.App):
    """Adds the delta of a number that comes of the task's seed."""

    shape = SHAPE

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """A device that needs a while for each step."""
        for _ in batches(len(examples), plan, seed):
            time.sleep(STEP_S)
        model["w"] += delta_of(int(np.random.default_rng(seed).integers(-NUMBERS // 2, NUMBERS // 2)))
        return {}


class Notes(logging.Handler):
    """What this device has done and was told; warnings as well. A line is whole, or the last one."""

    def __init__(self, path: Path, state_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self._outbox, known = state_dir / "outbox", path.read_text() if path.exists() else ""
        self._file = path.open("a")
        if not known.endswith("\n"):
            self._file.write("\n")  # after a line that a kill cut short
            known = known[: known.rfind("\n") + 1]
        self._made = {id_ for id_ in self._results() if f'"{id_}", "number"' in known}
        self.look()

    def look(self) -> None:
        """Note the results that are in the outbox and were not noted yet: none was sent before this."""
        for update_id in self._results() - self._made:
            entry, _ = UpdateEntry.from_bytes((self._outbox / f"{update_id}.update").read_bytes())
            number = int(np.frombuffer(entry.payload, np.float32)[0])
            self._write({"kind": "made", "update": update_id, "number": number, "base": entry.base_version})
        self._made = self._results()

    def hear(self, kind: str, **data: Any) -> None:
        """An event of the agent, in the thread that trains and sends."""
        if kind == "trained":
            self.look()
        elif kind in TOLD and data.get("call") != "heartbeat":
            self._write({"kind": kind, **data})

    def emit(self, record: logging.LogRecord) -> None:
        """A warning."""
        self._write({"kind": "warned", "text": record.getMessage()})

    def _results(self) -> set[str]:
        return {path.stem for path in self._outbox.glob("*.update")}

    def _write(self, note: dict[str, Any]) -> None:
        self._file.write(json.dumps(note | {"at": time.monotonic()}) + "\n")
        self._file.flush()


def main(address: str, joining: str, state_dir: str, notes_path: str, tasks_max: str) -> int:
    """Work until killed, or `tasks_max` tasks; returns the exit code."""
    notes = Notes(Path(notes_path), Path(state_dir))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("anabranch").addHandler(notes)
    options = ClientOptions(
        f"{__file__}:App",
        address,
        state_dir=Path(state_dir),
        tasks_max=int(tasks_max),
        retry_base_s=0.05,
        retry_cap_s=0.5,
        threads=1,
        **json.loads(joining),
    )
    try:
        run_client(options, notes.hear)
    except AnabranchError as error:
        notes.hear("stopped", error=f"{type(error).__name__}: {error}")
        return outcome_of(error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
