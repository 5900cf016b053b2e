"""Folders that cannot be written, disks that are full: one line that names the place, and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import RUN, anabranch, answer, serving
from small_disks import kept_disk, own_disk, read_only

from anabranch.client.records import Record, write_record
from anabranch.core.errors import OUTCOMES, FolderMissing, StoreError, StoreFull, outcome_of
from anabranch.identity.files import write_private

SIMULATE = ["simulate", "--set", "run.workload=synthetic", "--set", "run.updates_max=40", "--out"]


def said(arguments: list[str], cwd: Path, *launcher: str) -> tuple[int, str]:
    """The exit code, and the one line of the error."""
    if launcher:
        command = [*launcher, sys.executable, "-m", "anabranch.cli.main", *arguments]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    else:
        done = anabranch(cwd, *arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: "), line
    return done.returncode, line


MAKE_FOLDERS = pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--set", "run.workload=synthetic", "--set", "run.updates_max=4", "--out", "taken/run"],
        ["init", "synthetic", "--out", "taken/model"],
        ["client", "synthetic", "--state-dir", "taken/device"],
        ["admin", "ca", "init", "--folder", "taken/ca"],
    ],
    ids=lambda words: words[0],
)


@MAKE_FOLDERS
def test_a_folder_that_cannot_be_made(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")  # nobody, root neither, can make a folder in it
    exit_code, line = said(arguments, tmp_path)
    assert exit_code == outcome_of(StoreError()).exit_code
    assert f"{arguments[-1]}" in line
    assert "Not a directory" in line


@MAKE_FOLDERS
@pytest.mark.parametrize("below", [True, False])
def test_a_link_whose_disk_is_not_there(arguments: list[str], below: bool, tmp_path: Path) -> None:
    (tmp_path / "taken").symlink_to(tmp_path / "disk")
    exit_code, line = said(arguments if below else [*arguments[:-1], "taken"], tmp_path)
    assert exit_code == outcome_of(StoreError()).exit_code
    assert f"taken is a link to {tmp_path}/disk, which is not there" in line
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("arguments", [[*SIMULATE, "disk/run"], ["init", "digits", "--out", "disk/model"]])
def test_a_disk_that_is_really_full(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    exit_code, line = said(arguments, tmp_path, *own_disk(tmp_path / "disk", "8k"))
    assert exit_code == OUTCOMES[StoreFull].exit_code
    assert f"{arguments[-1]}: no space left on the disk" in line


def test_data_on_a_disk_that_can_only_be_read_are_checked_and_copied(tmp_path: Path) -> None:
    """Such as a backup, or the disk of a machine that is gone."""
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    local = ["--model", "model", "--data-dir", "data", "--updates", 6]
    free = ["--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"]
    with serving(tmp_path, "run.toml", *local, *free) as server:
        answer(anabranch(tmp_path, "client", "synthetic", "--server", server["address"], "--json"))
    command = [*read_only(tmp_path / "data"), sys.executable, "-m", "anabranch.cli.main"]
    for words, said in (
        (["verify", "data"], "data: sound. Version 2, 6 updates"),
        (["report", "data", "--out", "report"], "2 versions of 6 updates"),
        (["admin", "backup", "copy", "--data-dir", "data"], "sound; put it back with:"),
    ):
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr
        note = f"how far the data were proved is not noted: making {tmp_path}/data/proved/snapshots: "
        noted = note in done.stderr
        assert noted is (words[0] == "verify"), done.stderr


@pytest.mark.parametrize("command", ["simulate", "tune"])
def test_runs_side_by_side_that_have_no_place_for_their_locks(command: str, tmp_path: Path) -> None:
    arguments = [command, "synthetic", "--updates", "4", "--parallel", "2", "--out", "runs"]
    more = ["--seeds", "0..1"] if command == "simulate" else ["--no-defaults", "--range", "client.steps=1..2"]
    words = [*own_disk(Path("/dev/shm"), "4k,ro"), sys.executable, "-m", "anabranch.cli.main"]
    done = subprocess.run(
        [*words, *arguments, *more], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == OUTCOMES[StoreError].exit_code, done.stderr
    (line,) = done.stderr.strip().splitlines()  # below a bar, if there is one
    assert line.startswith("error: /dev/shm cannot be used: Read-only file system")
    assert line.endswith("or let one run come after the other: parallel = 1")


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", ">/dev/full"])
def test_nobody_need_hear_what_is_wrong(streams: str, tmp_path: Path) -> None:
    exit_code, line = said(["replay", "gone", "--json"], tmp_path, *shell(f'exec "$@" {streams}'))
    assert (exit_code, "gone is not there" in line) == (OUTCOMES[FolderMissing].exit_code, True)
    command = [sys.executable, "-m", "anabranch.cli.main", "replay", "gone"]
    for unheard in ("<&- >&- 2>&-", ">/dev/full 2>/dev/full"):
        words = [*shell(f'exec "$@" {unheard}'), *command]
        assert subprocess.run(words, cwd=tmp_path, timeout=600).returncode == exit_code, unheard


@pytest.mark.parametrize(
    "command", [[*SIMULATE, "run"], ["init", "digits", "--out", "model"], ["config", "show"]]
)
def test_an_answer_for_which_there_is_no_room_is_told_of_stdout(command: list[str], tmp_path: Path) -> None:
    exit_code, line = said(command, tmp_path, *shell('exec "$@" >/dev/full'))
    assert (exit_code, line) == (
        OUTCOMES[StoreFull].exit_code,
        "error: stdout: no space left on the disk: make room",
    )


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    words = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    exit_code, line = said([*SIMULATE, str(tmp_path / "run")], tmp_path, *shell(words))
    assert exit_code == OUTCOMES[FolderMissing].exit_code
    assert "the working directory is not there any more" in line


def test_no_room_for_a_temporary_file_anywhere(tmp_path: Path) -> None:
    exit_code, line = said(["check", "synthetic"], tmp_path, *shell('ulimit -f 0; exec "$@"'))
    assert exit_code == OUTCOMES[StoreError].exit_code
    assert line.startswith(
        "error: the folder for temporary files cannot be used: No usable temporary directory"
    )


def shell(words: str) -> list[str]:
    """A launcher: a shell that does this with a command."""
    return ["sh", "-c", words, "sh"]


def test_an_authority_that_found_no_room_is_not_in_its_own_way(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "ca"
    folder.parent.mkdir()
    with kept_disk(folder.parent, "24k") as (enter, seen):
        exit_code, line = said(["admin", "ca", "init", "--folder", str(folder)], tmp_path, *enter)
        assert exit_code == OUTCOMES[StoreFull].exit_code, line
        assert f"{folder}/register.db: no space left on the disk: make room" in line
        assert not any((seen / "ca").iterdir())


def test_what_a_device_keeps_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "kept.tmp").symlink_to("/dev/full")
    (tmp_path / "taken").write_text("a file")
    record = Record({"w": np.zeros(9)}, {})
    with pytest.raises(StoreFull, match=r"kept\.safetensors: no space left"):
        write_record(tmp_path / "kept.safetensors", record, durable=False)
    with pytest.raises(StoreError, match="cannot be used"):
        write_record(tmp_path / "taken" / "a.safetensors", record, durable=False)
    with pytest.raises(StoreError, match="cannot be used"):
        write_private(tmp_path / "taken" / "paper", b"text")
