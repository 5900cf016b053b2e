"""Digests of contents: what they are, how they are written, and what is said where one cannot be made."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contents import named, package
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core import content
from anabranch.core.content import (
    ALGORITHMS,
    BLAKE3,
    SHA256,
    ContentHash,
    algorithm_of,
    check_algorithm,
    check_content,
    content_digest,
    digest_like,
    digits,
    from_raw,
    to_raw,
    usable,
)
from anabranch.core.errors import ConfigError, StoreCorrupt

# Of the specification's test_vectors.json: the first 32 bytes of the hash of so many bytes 0, 1 to 250, 0, 1
BLAKE3_VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize("size", BLAKE3_VECTORS)
def test_blake3_is_that_of_its_specification(size: int) -> None:
    package()
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    assert content_digest(data, BLAKE3) == f"blake3-{BLAKE3_VECTORS[size]}"


def test_sha256_is_written_as_ever() -> None:
    assert content_digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(st.lists(st.binary(max_size=3000), max_size=5), st.sampled_from(ALGORITHMS))
def test_pieces_come_to_the_digest_of_the_whole(pieces: list[bytes], algorithm: str) -> None:
    whole = b"".join(pieces)
    expected = named(whole, algorithm)
    made = ContentHash(algorithm)
    for piece in pieces:
        made.update(memoryview(piece))
    assert made.text() == made.text() == expected == content_digest(bytearray(whole), algorithm)
    assert digest_like(whole, expected) == expected
    assert algorithm_of(expected) == algorithm
    assert from_raw(*to_raw(expected)) == expected
    assert to_raw(expected) == (algorithm, bytes.fromhex(expected[-64:]))
    assert digits(expected) == expected[-64:]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_of_any_kind_are_their_bytes(algorithm: str) -> None:
    values = np.arange(700, dtype=np.float32).reshape(7, 100)
    assert content_digest(values.data, algorithm) == named(values.tobytes(), algorithm)
    assert content_digest(np.empty(0, np.float32).data, algorithm) == named(b"", algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_bytes_are_found_out(algorithm: str) -> None:
    digest = named(b"these", algorithm)
    check_content(b"these", digest)
    other = named(b"those", algorithm)
    with pytest.raises(StoreCorrupt, match=f"payload {digest} has the digest {other}"):
        check_content(b"those", digest)


@pytest.mark.parametrize(
    "text",
    ["", "ab" * 31, "AB" * 32, "ab" * 33, "md5-" + "ab" * 32, "sha256-" + "ab" * 32, "blake3-ab", "../x"],
)
def test_what_is_no_digest_is_named_with_the_way_out(text: str) -> None:
    for use in (algorithm_of, to_raw, digits, lambda found: digest_like(b"", found)):
        with pytest.raises(ConfigError, match=r"this release knows \(sha256, blake3\): read it with"):
            use(text)


@pytest.mark.parametrize("text", ["", "00", "AB" * 32, "blake3-ab", "../x", "a b-" + "ab" * 32])
def test_a_stored_name_that_no_release_gives_is_damage(text: str) -> None:
    with pytest.raises(StoreCorrupt, match="is no digest: restore it from a backup"):
        check_content(b"these", text)


def test_a_stored_name_of_a_later_release_is_not() -> None:
    with pytest.raises(ConfigError, match="read it with the release that wrote it"):
        check_content(b"these", "xxh5-" + "ab" * 40)


def test_small_payloads_keep_to_sha256() -> None:
    assert [content.chosen(BLAKE3, size) for size in (0, 16 * 1024 - 1, 16 * 1024)] == [
        SHA256,
        SHA256,
        BLAKE3,
    ]
    assert content.chosen(SHA256, 1 << 30) == SHA256


@pytest.mark.parametrize("text", ["", "ab" * 32, "5678", "blake3-ab", "xxh3-ab"])
def test_what_a_digest_says_it_is_needs_no_check(text: str) -> None:
    assert content.kind_of(text) == (text.partition("-")[0] if "-" in text else SHA256)


def test_a_package_that_is_broken_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "blake3.py").write_text("raise ImportError('GLIBC_2.99 not found')")
    code = (
        "from anabranch.core.content import content_digest\n"
        "print(content_digest(b'abc'))\n"
        "content_digest(b'abc', 'blake3')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.startswith("ba7816bf")
    assert "not installed here (GLIBC_2.99 not found): pip install" in found.stderr


def test_what_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "blake3", None)
    assert (usable(SHA256), usable(BLAKE3), usable("md5")) == (True, False, False)
    for use in (check_algorithm, ContentHash, lambda algorithm: content_digest(b"", algorithm)):
        with pytest.raises(
            ConfigError, match=r'not installed here \(.*\): pip install "anabranch\[blake3\]"'
        ):
            use(BLAKE3)
        with pytest.raises(ConfigError, match="one of sha256, blake3, not 'md5'"):
            use("md5")
    with pytest.raises(ConfigError, match="pip install"):
        check_content(b"", "blake3-" + "0" * 64)
    assert content_digest(b"") == hashlib.sha256(b"").hexdigest()
