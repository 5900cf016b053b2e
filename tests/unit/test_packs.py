"""Payloads one after the other in a file: durable with one flush, found again, and never mixed up."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from anabranch.core.errors import StoreCorrupt
from anabranch.server.store.packs import PackPlace, Packs


def packs(folder: Path, pack_bytes: int = 1000) -> Packs:
    made = Packs(folder, pack_bytes)
    made.prepare()
    return made


def read(made: Packs, place: PackPlace, payload: bytes) -> bytes:
    return made.read(place, len(payload), hashlib.sha256(payload).hexdigest())


def test_payloads_come_back(tmp_path: Path) -> None:
    made, payloads = packs(tmp_path), [b"one", b"two" * 200, b"three" * 100, b"four"]
    places = made.write(payloads)
    assert [p.pack for p in places] == [1, 1, 1, 2]  # a pack ends with what makes it large enough
    assert [read(made, at, data) for at, data in zip(places, payloads, strict=True)] == payloads
    assert made.write([]) == []
    made.close()


def test_another_start_begins_another_pack(tmp_path: Path) -> None:
    first = packs(tmp_path)
    (place,) = first.write([b"one"])
    first.close()
    again = packs(tmp_path)
    assert again.write([b"two"]) == [PackPlace(2, 0)]
    assert read(again, place, b"one") == b"one"
    again.close()


def test_a_failure_begins_another_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.core.errors import StoreFull

    made = packs(tmp_path)
    made.write([b"one"])
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", _no_space)
        with pytest.raises(StoreFull):
            made.write([b"two"])
    assert made.write([b"two"]) == [PackPlace(2, 0)]
    made.close()


def _no_space(descriptor: int) -> None:
    import errno

    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    made = packs(tmp_path)
    (place,) = made.write([b"payload"])
    made.close()
    (path,) = (tmp_path / "packs").iterdir()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"payl" if damage == "cut" else b"Payload")
    with pytest.raises(StoreCorrupt):
        read(made, place, b"payload")
