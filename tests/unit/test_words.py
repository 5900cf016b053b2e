"""Ids, errors and what to install: what is said, and what is let through."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from anabranch.cli.program import _of_disk
from anabranch.core import errors
from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import OUTCOMES, Outcome, disk_error, outcome_of
from anabranch.core.ids import checked_id
from anabranch.core.limits import Limits
from anabranch.core.model.arrays import from_bytes, plain, to_bytes
from anabranch.identity.files import whose


@pytest.mark.parametrize("text", ["a", "7", "A-b_c.9", "x" * 64])
def test_ids_that_are_safe(text: str) -> None:
    assert checked_id(text, "task_id") == text


@pytest.mark.parametrize("text", ["", "x" * 65, "-a", ".a", "../x", "_a", "a/b", "a b", "a\n", "a\x00", "ä"])
def test_ids_that_are_not(text: str) -> None:
    with pytest.raises(errors.InvalidUpdate, match="task_id must be 1 to 64 ASCII letters, digits"):
        checked_id(text, "task_id")
    with pytest.raises(errors.InvalidUpdate, match="must be 1 to 3 ASCII letters"):
        checked_id("abcd", "task_id", Limits(id_chars_max=3))


def test_an_error_has_the_outcome_of_its_nearest_kind() -> None:
    for kind, outcome in OUTCOMES.items():
        assert outcome_of(kind("why")) == outcome

    class Odd(errors.StoreFull):
        """Of a kind that is in the table."""

    assert outcome_of(Odd("why")) == OUTCOMES[errors.StoreFull]
    assert outcome_of(ValueError("why")) == Outcome("INTERNAL", 1, retryable=False)


def test_an_exit_code_says_what_it_was() -> None:
    codes = [outcome.exit_code for outcome in OUTCOMES.values()]
    assert len(set(codes)) == len(codes)
    assert not {0, 1} & set(codes)


def test_what_may_be_tried_again() -> None:
    again = {kind.__name__ for kind, outcome in OUTCOMES.items() if outcome.retryable}
    assert again == {"Overloaded", "Unavailable", "StoreFull", "LeadershipLost", "ClocksDisagree"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_from_a_broken_one(number: int) -> None:
    full = disk_error("/data", OSError(number, "no room"))
    assert isinstance(full, errors.StoreFull)
    assert str(full).startswith("/data: no space left on the disk")
    broken = disk_error("/data", OSError(errno.EIO, "Input/output error"))
    assert type(broken) is errors.StoreError
    assert str(broken) == "/data cannot be used: Input/output error"
    assert str(disk_error("/data", OSError("odd"))) == "/data cannot be used: odd"
    unseen = OSError(errno.ENAMETOOLONG, "File name too long", "/" + "a" * 300)  # nor can its links be
    assert str(disk_error("/data", unseen)) == "/data cannot be used: File name too long"


def test_a_link_is_named_where_it_is_why_and_leads_nowhere(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to("gone")
    (loop := tmp_path / "loop").symlink_to("loop")
    there = OSError(errno.EEXIST, "File exists", str(link))
    assert str(disk_error("d", there)) == f"d cannot be used: {link} is a link to gone, which is not there"
    of_others = ((errno.EROFS, link), (errno.EACCES, link), (errno.ELOOP, loop), (errno.EEXIST, loop))
    for number, path in of_others:
        error = OSError(number, "as it is", str(path))
        assert str(disk_error("d", error)) == "d cannot be used: as it is"


def test_who_is_denied_what_is_whose(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    who = f" (this process is of uid {os.geteuid()}, {tmp_path} of uid {tmp_path.stat().st_uid}, mode 750)"
    for number in (errno.EACCES, errno.EPERM):  # of the nearest folder that can be looked at
        assert whose(tmp_path / "not" / "there", OSError(number, "Permission denied")) == who
    assert whose(tmp_path, OSError(errno.EROFS, "Read-only file system")) == ""


def test_a_command_says_whose_a_file_is(tmp_path: Path) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "ca.key"))
    assert str(_of_disk(denied)).startswith(f"{tmp_path / 'ca.key'} cannot be used: Permission denied (this")
    assert str(_of_disk(OSError(errno.EIO, "odd"))) == "what was written cannot be used: odd"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("torch", 'pip install "anabranch[client]"'),
        ("torch.nn", 'pip install "anabranch[client]"'),
        ("psycopg", 'pip install "anabranch[postgresql]"'),
        ("torches", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_how_a_module_is_installed(module: str | None, command: str) -> None:
    assert how_to_install(module) == command


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", ">i8"])
def test_bytes_of_arrays_are_those_of_their_values_in_order(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    wanted = np.arange(6).astype(dtype.replace(">", "<")).tobytes()
    for found in (array, np.asfortranarray(array)):
        assert to_bytes(found).tobytes() == wanted
        assert plain(found).flags.c_contiguous
    back = from_bytes(wanted, array.dtype.name, (2, 3))
    assert back.tolist() == array.tolist()
    back[0, 0] = 9  # it is its own
    assert to_bytes(np.float32(1)).tobytes() == np.array([1], "<f4").tobytes()
    assert plain(np.float32(1)).shape == ()
    with pytest.raises(ValueError, match=re.escape("cannot reshape")):
        from_bytes(wanted, array.dtype.name, (2, 2))
