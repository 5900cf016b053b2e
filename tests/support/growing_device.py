"""A device process whose model grows: `python growing_device.py ADDRESS CLIENT_ID STATE_DIR TASKS_MAX`."""

from __future__ import annotations

import sys
from pathlib import Path

import crash_device

if __name__ == "__main__":
    address, client_id, state_dir, tasks_max = sys.argv[1:]
    app = Path(__file__).with_name("growing_app.py")
    crash_device.main(address, client_id, state_dir, tasks_max, f"{app}:App")
