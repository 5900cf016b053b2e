"""What is said of the folders of runs: where one goes, and what one that was interrupted has left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from anabranch.cli.next_steps import resume_command
from anabranch.cli.output import Output
from anabranch.cli.summary import summary
from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, DataError
from anabranch.core.model.chains import AUTO
from anabranch.reports.folders import CHECKPOINT, holds_run
from anabranch.reports.result import RESULT_FILE, Result
from anabranch.reports.settings import differing

SETTINGS_TOLD = 4
EXECUTOR = "fleet.executor"
OF_CODE = "where the code is not at fault it can go on (mended code is another run)"


def where_it_goes(output: Output, settings: Config, wanted: Path, folder: Path) -> None:
    """A line where the folder that was wanted holds a run already, and what is otherwise in that one."""
    if folder == wanted:
        return
    try:
        known = Result.read(wanted)
        found = differing([known.config, settings.to_json()])
        other = [k for k in found if k != EXECUTOR or settings.fleet.executor != AUTO]  # it was settled there
        more = ", ..." if len(other) > SETTINGS_TOLD else ""
        what = f"other settings ({', '.join(other[:SETTINGS_TOLD])}{more})" if other else "the same settings"
        what = f"a run with {what}" if known.status == "finished" else f"an interrupted run with {what}"
    except DataError:
        what = "a run that was not finished" if holds_run(wanted) else "something else"
    goes_on = " (--resume goes on with it)" if (wanted / CHECKPOINT).is_file() else ""
    output.say(f"{wanted} has {what}{goes_on}: this one goes to {folder}")


@contextlib.contextmanager
def say_what_is_left(output: Output, folder: Path) -> Iterator[None]:
    """Of a run that does not come to its end: what is in its folder."""
    before = _written_at(folder / RESULT_FILE)
    try:
        yield
    except BaseException as error:
        if _written_at(folder / RESULT_FILE) != before:
            result = Result.read(folder)
            output.result(result.to_json(), f"interrupted: {summary(result, folder)}")
            learned = result.updates_applied + result.updates_rejected > 0
            of_app = isinstance(error, AppError)  # which ends the same run the same way
            if (folder / CHECKPOINT).is_file() and (learned or not of_app):
                so = OF_CODE if of_app else "it can go on"
                output.say(f"{so}:\n  {resume_command(sys.argv, folder)}")
        raise


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0
