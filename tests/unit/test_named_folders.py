"""A folder that is not there, and a file that was named in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.core.errors import DataError, FolderMissing
from anabranch.support.folders import check_folder


def test_a_file_in_the_place_of_a_folder_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (file := tmp_path / "result.json").write_text("{}")
    check_folder(tmp_path, "name a run")
    with pytest.raises(FolderMissing, match=r"gone is not there: name a run$"):
        check_folder(tmp_path / "gone", "name a run")
    with pytest.raises(DataError, match=r"result\.json is a file: name a run$") as found:
        check_folder(file, "name a run")
    assert not isinstance(found.value, FolderMissing)
