"""Any files make a bundle that opens to the same files; with any byte changed it opens to nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hand_bundles import key_of, signer
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import AnabranchError
from anabranch.identity.bundle import open_bundle, pack

PARTS = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,8}", fullmatch=True)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


def _apart(paths: list[str]) -> bool:
    """Whether no file is another's folder."""
    return not any(one != other and other.startswith(f"{one}/") for one in paths for other in paths)


FILES = st.dictionaries(PATHS, st.binary(max_size=200), min_size=1, max_size=6).filter(lambda f: _apart([*f]))


@given(FILES, st.integers(0, 2**40), st.integers(1, 9))
def test_what_goes_in_comes_out(files: dict[str, bytes], created_at: int, number: int) -> None:
    said: dict[str, Any] = {"name": "x", "entry": "a:b", "created_at": created_at}
    made = pack(files, key_of(number), **said)
    found = open_bundle(made, {signer(number)})
    assert found.files == files
    assert [file.path for file in found.manifest.files] == sorted(files)
    assert (found.manifest.created_at, found.signer) == (created_at, signer(number))
    assert made == pack(
        dict(reversed(files.items())), key_of(number), name="x", entry="a:b", created_at=created_at
    )


@given(FILES, st.data())
def test_one_changed_byte_anywhere_is_refused(files: dict[str, bytes], data: st.DataObject) -> None:
    made = pack(files, key_of(1), name="x", entry="a:b", created_at=0)
    at = data.draw(st.integers(0, len(made) - 1), "at")
    flipped = bytearray(made)
    flipped[at] ^= data.draw(st.integers(1, 255), "flip")
    for signers in (None, {signer(1)}):
        with pytest.raises(AnabranchError):
            open_bundle(bytes(flipped), signers)


@given(FILES, st.data())
def test_what_was_cut_or_grew_is_refused(files: dict[str, bytes], data: st.DataObject) -> None:
    made = pack(files, key_of(1), name="x", entry="a:b", created_at=0)
    cut = made[: data.draw(st.integers(0, len(made) - 1), "cut")]
    for other in (cut, made + data.draw(st.binary(min_size=1, max_size=20), "more")):
        with pytest.raises(AnabranchError):
            open_bundle(other)


def test_each_byte_of_one_bundle() -> None:
    made = pack({"app.py": b"x = 1\n"}, key_of(1), name="x", entry="app:x", created_at=7)
    for at in range(len(made)):
        for bit in range(8):
            flipped = bytearray(made)
            flipped[at] ^= 1 << bit
            with pytest.raises(AnabranchError):
                open_bundle(bytes(flipped))
