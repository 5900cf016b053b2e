"""What is said of the folders of runs: where one goes, and what one that was interrupted has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from anabranch.cli.options import summary
from anabranch.cli.output import Output
from anabranch.core.config.tables import NO_KEY, Config
from anabranch.core.errors import DataError
from anabranch.core.model.chains import AUTO
from anabranch.reports.folders import holds_run
from anabranch.reports.result import RESULT_FILE, Result
from anabranch.reports.settings import differing
from anabranch.strategies.registry import BUILT_IN

SETTINGS_TOLD = 4
EXECUTOR = "fleet.executor"


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
    output.say(f"{wanted} has {what}: this one goes to {folder}")


@contextlib.contextmanager
def say_what_is_left(output: Output, folder: Path) -> Iterator[None]:
    """Of a run that does not come to its end: what is in its folder."""
    try:
        yield
    except BaseException:
        if (folder / RESULT_FILE).is_file():
            result = Result.read(folder)
            output.result(result.to_json(), f"interrupted: {summary(result, folder)}")
        raise


def read_finished(output: Output, folders: Sequence[Path]) -> list[Result]:
    """The results that can be compared; the other folders are named in a line each and left out.

    A run that was repeated, to the same digests, counts once. Raises `DataError` for the only folder.
    """
    found: dict[tuple[str, str], Path] = {}
    results = []
    for folder in folders:
        try:
            result = Result.read(folder)
        except DataError as error:
            if len(folders) == 1:
                raise
            output.warn(f"left out: {error}")
            continue
        digests = result.journal_sha256, result.model_sha256
        if result.status != "finished":
            output.warn(f"left out: {folder} was interrupted ({result.why})")
        elif result.journal_sha256 and digests in found:
            output.warn(f"left out: {folder} is the same run as {found[digests]}, to the bit")
        else:
            found[digests] = folder
            results.append(result)
    return results


def completed(result: Result) -> Result:
    """The result with every parameter of its strategy: to give one its default changes nothing."""
    cls = BUILT_IN.get(result.strategy)
    if cls is None:
        return result
    plain = cls()
    defaults = {f.name: getattr(plain, f.name) for f in fields(cls) if f.metadata != NO_KEY}
    strategy = {"name": result.strategy, **defaults, **result.config.get("strategy", {})}
    return replace(result, config={**result.config, "strategy": strategy})
