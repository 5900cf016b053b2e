"""What an App keeps counts exactly when its result is in the outbox, wherever a crash strikes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.results import Results


class Crash(Exception):
    """The process is gone."""


def entry(update_id: str) -> UpdateEntry:
    return UpdateEntry(update_id, f"t{update_id}", "layout", 0, 1, 1, "raw", b"1234", 1)


def test_what_is_kept_is_that_of_the_newest_result(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert results.kept("run") == b""
    results.put(entry("a"), None, b"one", "run")
    results.put(entry("b"), None, b"two", "run")
    assert Results(tmp_path).kept("run") == b"two"
    results.discard("a")
    results.discard("b")
    assert Results(tmp_path).kept("run") == b"two"


def test_another_run_starts_with_nothing(tmp_path: Path) -> None:
    Results(tmp_path).put(entry("a"), None, b"one", "run")
    assert Results(tmp_path).kept("another") == b""


def test_nothing_kept_costs_no_file(tmp_path: Path) -> None:
    Results(tmp_path).put(entry("a"), None, b"", "run")
    assert not (tmp_path / "kept").exists()


def test_what_was_kept_can_be_given_up(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.put(entry("a"), None, b"one", "run")
    results.put(entry("b"), None, b"", "run")
    assert Results(tmp_path).kept("run") == b""


def crashed_put(folder: Path, update_id: str, kept: bytes, moment: str, patch: pytest.MonkeyPatch) -> None:
    """Put a result, and crash before the outbox has it, or after."""
    results = Results(folder)
    with patch.context() as here:
        if moment == "before":

            def put(self: Outbox, entry: UpdateEntry) -> None:
                raise Crash

            here.setattr(Outbox, "put", put)
        else:

            def count_next(self: Results) -> None:
                raise Crash

            here.setattr(Results, "_count_next", count_next)
        with pytest.raises(Crash):
            results.put(entry(update_id), None, kept, "run")


@given(st.lists(st.sampled_from(["well", "before", "after"]), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_crash_at_any_moment_leaves_the_two_in_step(moments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), b""
        for number, moment in enumerate(moments):
            kept = f"after {number}".encode()
            if moment == "well":
                Results(folder).put(entry(f"u{number}"), None, kept, "run")
            else:
                crashed_put(folder, f"u{number}", kept, moment, patch)
            expected = expected if moment == "before" else kept
            assert Results(folder).kept("run") == expected
            assert (f"u{number}" in Results(folder).waiting()) is (moment != "before")
