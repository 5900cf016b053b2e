"""What follows from a device's name: its folder and its part of the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.client.shards import numbered_shard
from anabranch.client.state import device_id, locked, state_dir_of
from anabranch.core.errors import ConfigError, StoreLocked


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("device-0", (0, 4)),
        ("device-3", (3, 4)),
        ("device-11", (3, 4)),
        ("lab.2", (2, 4)),
        ("1", (1, 4)),
        ("alice", (0, 1)),
        ("device-3b", (0, 1)),
        ("device-7f3a01c2", (0, 1)),  # made up: the digits at its end are no number of anybody's
    ],
)
def test_the_number_of_a_name_is_its_shard(name: str, part: tuple[int, int]) -> None:
    assert numbered_shard(name, {"fleet": {"clients": 4}}) == part


def test_a_name_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert state_dir_of("") == Path("anabranch-device")
    assert state_dir_of("device-3") == Path("anabranch-devices/device-3")
    made_up = device_id(state_dir_of(""))
    assert state_dir_of(made_up) == Path("anabranch-device"), "its state is there already"
    assert device_id(state_dir_of(made_up), made_up) == made_up
    for name in ("../elsewhere", "a b"):
        with pytest.raises(ConfigError, match="--id must be"):
            state_dir_of(name)
        with pytest.raises(ConfigError, match="--id must be"):
            device_id(tmp_path / "given", name)


def test_two_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StoreLocked, match="a name of its own, --id device-0"):
        device_id(tmp_path)
    assert not (tmp_path / "client_id").exists(), "the other one names the folder"
