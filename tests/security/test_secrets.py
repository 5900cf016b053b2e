"""Where secrets and private results lie, and who may read them."""

from __future__ import annotations

from pathlib import Path

from guarded import Federation

from anabranch.client.state import device_id, locked


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and of all in it, by name."""
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def test_a_devices_folder_is_its_owners_alone(tmp_path: Path) -> None:
    device_id(tmp_path / "named")
    with locked(tmp_path / "nameless"):
        pass
    for folder in (tmp_path / "named", tmp_path / "nameless"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_keys_and_papers_are_their_owners_alone(guarded: Federation) -> None:
    wallet = guarded.joined("device-1")
    operator = guarded.operator()
    guarded.transport(wallet).close()
    for folder in (guarded.authority.folder, wallet.folder, operator.folder):
        found = modes(folder)
        assert found.pop(folder.name) == 0o700
        assert set(found.values()) == {0o600}, found
