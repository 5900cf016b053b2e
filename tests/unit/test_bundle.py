"""The format of a bundle: what is opened, and all that is refused though its signature is good."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hand_bundles import FILES, by_hand, key_of, line_of, listed, manifest, signer, whole

from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    DataError,
    InvalidSignature,
    NotPermitted,
    TooLarge,
)
from anabranch.core.limits import BUNDLE_BYTES_MAX, BUNDLE_FILES_MAX, BUNDLE_MANIFEST_BYTES_MAX
from anabranch.identity.bundle import open_bundle, pack
from anabranch.identity.signers import checked_signers, make_signer, read_signer, signer_of

NONE = ["empty", "zip", "later", "cut", "capitals"]
SAID: dict[str, Any] = {"name": "mine", "entry": "app:Mine", "created_at": 1_800_000_000, "needs": ["numpy"]}


def test_a_bundle_is_written_as_the_page_says() -> None:
    assert pack(FILES, key_of(1), **SAID) == whole()
    found = open_bundle(whole(), {signer(1)})
    assert (found.signer, found.files, found.manifest.needs) == (signer(1), FILES, ("numpy",))
    assert (found.manifest.entry, found.manifest.python) == ("app:Mine", (3, 11))
    assert found.manifest.size_bytes == sum(map(len, FILES.values()))


def test_the_order_in_which_files_are_given_is_all_the_same() -> None:
    turned = dict(reversed(FILES.items()))
    assert pack(turned, key_of(1), **SAID) == pack(FILES, key_of(1), **SAID)


def test_another_signer_is_refused_and_named() -> None:
    with pytest.raises(NotPermitted, match=f"signed by {signer(2)}, who is not allowed here"):
        open_bundle(whole(number=2), {signer(1)})
    with pytest.raises(NotPermitted):
        open_bundle(whole(number=2), ())
    assert open_bundle(whole(number=2)).signer == signer(2)


def test_another_key_cannot_sign_for_an_allowed_one() -> None:
    forged = whole(number=2).replace(signer(2).encode(), signer(1).encode())
    with pytest.raises(InvalidSignature, match="not what its signer has signed"):
        open_bundle(forged, {signer(1)})


def test_a_signature_for_another_purpose_is_none_of_a_bundle() -> None:
    other = by_hand(line_of(manifest()), b"".join(FILES.values()), magic=b"anabranch update 1\n")
    with pytest.raises(DataError, match="this is no bundle"):
        open_bundle(other)
    with pytest.raises(InvalidSignature):
        open_bundle(other.replace(b"anabranch update 1\n", b"anabranch bundle 1\n"))


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../app.py",
            "/etc/passwd",
            "a/../../b.py",
            "./a.py",
            "a//b.py",
            "a/",
            "",
            ".hidden",
            "a/.git/config",
        ),
        *(
            "a\\b.py",
            "C:/a.py",
            "a\nb.py",
            "a\x00.py",
            "ü.py",
            "~/a.py",
            "x" * 201,
            "a/" * 8 + "b.py",
            "-o.py",
        ),
    ],
    ids=lambda path: ascii(path[:20]),
)
def test_no_path_leads_out_of_the_folder_or_hides_in_it(path: str) -> None:
    with pytest.raises(DataError, match="a bundle cannot have a file"):
        open_bundle(whole({path: b"x"}))
    with pytest.raises(DataError, match="a bundle cannot have a file"):
        pack({path: b"x"}, key_of(1), **SAID)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.py", "a.py"], "has 'a.py' twice"),
        (["A.py", "a.py"], "has 'a.py' twice"),
        (["b.py", "a.py"], "not in the order of their names"),
        (["a", "a/b.py"], "'a' as a file and as a folder"),
        (["A/b.py", "a"], "'a' as a file and as a folder"),
        ([], "has no file"),
    ],
)
def test_files_that_cannot_lie_beside_each_other(names: list[str], said: str) -> None:
    files = [listed({name: b"x"})[0] for name in names]
    with pytest.raises(DataError, match=said):
        open_bundle(by_hand(line_of(manifest(files=files)), b"x" * len(names)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "a b", "name is 'a b', which is none"),
        ("name", "x" * 65, "name has 65 characters, at most 64"),
        ("entry", "app", "entry is 'app', which is none"),
        ("entry", "app:Mine()", "entry is"),
        ("entry", "../app:Mine", "entry is"),
        ("entry", "a." * 150 + "b:c", "entry is"),
        ("requires_python", "3.11", "requires_python is '3.11', which is none"),
        ("requires_python", ">=3.11,<4", "requires_python is"),
        ("needs", ["numpy; rm"], "needs 'numpy; rm', which is no distribution's name"),
        ("needs", ["--index-url"], "needs '--index-url'"),
        ("needs", ["x" * 65], "needs 'xxx"),
        ("needs", "numpy", "needs must be"),
        ("needs", [7], r"needs\[0\] must be str"),
        ("created_at", "now", "created_at must be int"),
        ("created_at", 1.5, "created_at must be int"),
        ("files", {}, "files must be"),
        ("files", [{"path": "a.py", "sha256": "0" * 64, "size_bytes": -1}], "no size or no SHA-256"),
        ("files", [{"path": "a.py", "sha256": "0" * 63, "size_bytes": 0}], "no size or no SHA-256"),
        ("files", [{"path": "a.py", "sha256": "0" * 64}], "size_bytes"),
        ("files", [{"path": "a.py", "sha256": "0" * 64, "size_bytes": 0, "mode": 0o777}], "mode"),
        ("more", 1, "more"),
    ],
    ids=str,
)
def test_a_manifest_says_what_manifests_say(field: str, value: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_bundle(by_hand(line_of(manifest(**{field: value})), b"".join(FILES.values())))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b"[" * 100_000,
        json.dumps(manifest(), sort_keys=True).encode(),
        b" " + line_of(manifest()),
        line_of(manifest()).replace(b'"name":"mine"', b'"name":"else","name":"mine"'),
        line_of(manifest()).replace(b"mine", b"m\\u0069ne"),
    ],
    ids=["empty", "cut", "list", "number", "bytes", "deep", "spaces", "before", "twice", "escape"],
)
def test_a_manifest_is_written_in_one_way(line: bytes) -> None:
    with pytest.raises(DataError, match="manifest"):
        open_bundle(by_hand(line, b"".join(FILES.values())))


@pytest.mark.parametrize("change", [b"", b"more", b"less"])
def test_the_files_are_those_of_the_manifest(change: bytes) -> None:
    rest = b"".join(FILES.values())
    rest = {b"": rest.replace(b"one", b"two"), b"more": rest + b"\n", b"less": rest[:-1]}[change]
    with pytest.raises(DataError, match=r"its SHA-256 differs|bytes of files"):
        open_bundle(by_hand(line_of(manifest()), rest))


def test_what_is_too_large_is_neither_made_nor_opened() -> None:
    large = {"a.bin": bytes(BUNDLE_BYTES_MAX)}
    for refused in (lambda: open_bundle(whole(large)), lambda: pack(large, key_of(1), **SAID)):
        with pytest.raises(TooLarge, match="at most 16 MiB"):
            refused()
    just = {"a.bin": bytes(BUNDLE_BYTES_MAX - len(whole({"a.bin": b""})) - 7)}  # its size has 8 digits, not 1
    assert len(whole(just)) == BUNDLE_BYTES_MAX
    assert open_bundle(whole(just)).files == just
    assert pack(just, key_of(1), **SAID) == whole(just)
    many = {f"f{n:04}.txt": b"" for n in range(BUNDLE_FILES_MAX + 1)}
    for refused in (lambda: open_bundle(whole(many)), lambda: pack(many, key_of(1), **SAID)):
        with pytest.raises(TooLarge, match="1001 files, at most 1000"):
            refused()
    many.popitem()
    assert len(open_bundle(whole(many)).files) == BUNDLE_FILES_MAX
    wordy = by_hand(b"x" * (BUNDLE_MANIFEST_BYTES_MAX + 1), b"")
    with pytest.raises(TooLarge, match="manifest has"):
        open_bundle(wordy)


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"anabranch bundle 2\n", whole()[:40], whole().upper()], ids=NONE
)
def test_what_is_no_bundle(data: bytes) -> None:
    with pytest.raises(DataError, match="this is no bundle"):
        open_bundle(data)


def test_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "signer.key"
    made = make_signer(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert signer_of(read_signer(file)) == made
    with pytest.raises(ConfigError, match="is there already"):
        make_signer(file)
    file.chmod(0o644)
    read_signer(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bundle key --out"):
        read_signer(tmp_path / "nowhere.key")
    file = tmp_path / "x.key"
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no key of a signer"):
        read_signer(file)
    other = ec.generate_private_key(ec.SECP256R1())
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="of another kind"):
        read_signer(file)
    with pytest.raises(AnabranchError):
        read_signer(tmp_path)


def test_signers_are_64_digits() -> None:
    assert checked_signers([f" {signer(1).upper()}\n", signer(1)]) == {signer(1)}
    for text in ("", "00", signer(1)[:-1], signer(1) + "0", signer(1)[:-1] + "g", "../" + signer(1)):
        with pytest.raises(ConfigError, match="64 hex digits"):
            checked_signers([text])
