"""A bundle: the code of an App as one signed file, which travels to devices that allow its signer.

    anabranch bundle 1
    <the signer: an Ed25519 public key, 64 hex digits>
    <the signature: 128 hex digits>
    <the manifest: canonical JSON, one line>
    <the files, one after the other, in the order of the manifest>

All but the signature's own line is signed, and nothing is read before the signature is checked. There is one
way to write what is in a bundle: no compression, no links, no modes, no second name for a file. So there is
nothing to expand, nothing to follow, and the same files make the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from anabranch.core.canonical import canonical
from anabranch.core.errors import AnabranchError, DataError, NotPermitted, TooLarge
from anabranch.core.ids import stranger
from anabranch.core.limits import (
    BUNDLE_BYTES_MAX,
    BUNDLE_FILES_MAX,
    BUNDLE_MANIFEST_BYTES_MAX,
    MIB,
)
from anabranch.core.plain import finite, from_plain, make_converter
from anabranch.identity.signers import check_signed, signer_of

MAGIC = b"anabranch bundle 1\n"
_HEAD = re.compile(MAGIC + rb"([0-9a-f]{64})\n([0-9a-f]{128})\n")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")  # of a bundle
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")  # of a path: nothing hidden, no way up, no backslash
_ENTRY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
_PYTHON = re.compile(r">=(\d{1,3})\.(\d{1,3})\Z", re.ASCII)
_NEEDED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")  # PEP 508's names of distributions
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
NAME_CHARS_MAX, PATH_CHARS_MAX, PARTS_MAX = 64, 200, 8

_converter = make_converter(finite)


@dataclass(frozen=True)
class BundledFile:
    """A file of a bundle; `path`: with slashes, from the bundle's root. Raises `DataError`."""

    path: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_path(self.path)
        if self.size_bytes < 0 or not _SHA256.match(self.sha256):
            raise DataError(f"the bundle's file {self.path!r} has no size or no SHA-256")


@dataclass(frozen=True)
class BundleManifest:
    """What a bundle says of itself. Raises `DataError` for what no bundle may say.

    `entry`: the App, as `module:attribute`. `needs`: the distributions that a device must have, by the names
    of the package index. `requires_python`: `>=3.11`. `created_at`: seconds since 1970.
    """

    name: str
    entry: str
    requires_python: str
    needs: tuple[str, ...]
    created_at: int
    files: tuple[BundledFile, ...]

    def __post_init__(self) -> None:
        for field, pattern in (("name", _NAME), ("entry", _ENTRY), ("requires_python", _PYTHON)):
            if len(text := getattr(self, field)) > PATH_CHARS_MAX or not pattern.match(text):
                raise DataError(f"the bundle's {field} is {text[:PATH_CHARS_MAX]!r}, which is none")
        if len(self.name) > NAME_CHARS_MAX:
            raise DataError(f"the bundle's name has {len(self.name)} characters, at most {NAME_CHARS_MAX}")
        if odd := [name for name in self.needs if len(name) > NAME_CHARS_MAX or not _NEEDED.match(name)]:
            raise DataError(f"the bundle needs {odd[0][:PATH_CHARS_MAX]!r}, which is no distribution's name")
        check_paths([file.path for file in self.files])

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def python(self) -> tuple[int, int]:
        """The oldest Python that it runs on."""
        major, minor = self.requires_python.removeprefix(">=").split(".")
        return int(major), int(minor)

    def line(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII, and its end of line."""
        return canonical(asdict(self)) + b"\n"


@dataclass(frozen=True)
class Bundle:
    """What was found in a bundle whose signature is good. `files`: path -> bytes."""

    signer: str
    sha256: str
    manifest: BundleManifest
    files: Mapping[str, bytes]


def check_path(path: str) -> None:
    """Raises `DataError` for a path that could be anywhere but below the bundle's root, or hidden there."""
    parts = path.split("/")
    if len(path) > PATH_CHARS_MAX or len(parts) > PARTS_MAX or not all(map(_PART.match, parts)):
        raise DataError(
            f"a bundle cannot have a file {path[:PATH_CHARS_MAX]!r}{stranger(path, '._-/')}: names are of "
            f"ASCII letters, digits, '_', '-' and '.', not first, in at most {PARTS_MAX} folders, below the "
            "bundle's own"
        )


def check_paths(paths: list[str]) -> None:
    """Raises `DataError`, or `TooLarge`, for files that cannot lie beside each other on every disk."""
    if len(paths) > BUNDLE_FILES_MAX:
        raise TooLarge(f"the bundle has {len(paths)} files, at most {BUNDLE_FILES_MAX}")
    if not paths:
        raise DataError("the bundle has no file")
    if paths != sorted(paths):
        raise DataError("the bundle's files are not in the order of their names")
    folded = [path.lower() for path in paths]
    if twice := [path for path, times in Counter(folded).items() if times > 1]:
        raise DataError(f"the bundle has {twice[0]!r} twice, in capitals or without")
    folders = {str(folder) for path in folded for folder in PurePosixPath(path).parents}
    if both := [path for path in folded if path in folders]:
        raise DataError(f"the bundle has {both[0]!r} as a file and as a folder")


def pack(
    files: Mapping[str, bytes],
    key: Ed25519PrivateKey,
    *,
    name: str,
    entry: str,
    created_at: int,
    requires_python: str = ">=3.11",
    needs: Collection[str] = (),
) -> bytes:
    """A bundle of these files: the same bytes for the same arguments. For what they say see the manifest.

    Raises `DataError` and `TooLarge` for what nobody would open.
    """
    listed = tuple(
        BundledFile(path, len(files[path]), hashlib.sha256(files[path]).hexdigest()) for path in sorted(files)
    )
    manifest = BundleManifest(name, entry, requires_python, tuple(sorted(needs)), created_at, listed)
    content = b"".join([manifest.line(), *(files[file.path] for file in listed)])
    signer = signer_of(key).encode() + b"\n"
    signature = key.sign(MAGIC + signer + content).hex().encode() + b"\n"
    made = MAGIC + signer + signature + content
    _check_size(len(made), len(manifest.line()))
    return made


def open_bundle(data: bytes, signers: Collection[str] | None = None) -> Bundle:
    """What is in a bundle, once its signature is found good. `signers`: those allowed; None: whoever it is.

    Raises `NotPermitted` for another signer, `InvalidSignature` where it was changed, `DataError` and
    `TooLarge` where it is no bundle that this program opens.
    """
    if len(data) > BUNDLE_BYTES_MAX:
        _check_size(len(data))
    head = _HEAD.match(data)
    if head is None:
        raise DataError("this is no bundle of an App, or one of a later form: install a newer anabranch")
    signer = head[1].decode()
    check_allowed(signer, signers)
    content = data[head.end() :]
    check_signed(signer, bytes.fromhex(head[2].decode()), MAGIC + head[1] + b"\n" + content)
    line, newline, rest = content.partition(b"\n")
    manifest = _manifest(line + newline)
    return Bundle(signer, hashlib.sha256(data).hexdigest(), manifest, _files(manifest, rest))


def check_allowed(signer: str, signers: Collection[str] | None) -> None:
    """Raises `NotPermitted` unless bundles of this signer are allowed; None: everybody's are."""
    if signers is not None and signer not in signers:
        raise NotPermitted(
            f"the bundle is signed by {signer}, who is not allowed here: if you trust that one with this "
            f"device, say --signer {signer}"
        )


def _manifest(line: bytes) -> BundleManifest:
    """Raises `DataError`, `TooLarge`."""
    if len(line) > BUNDLE_MANIFEST_BYTES_MAX:
        _check_size(0, len(line))
    try:
        manifest = from_plain(json.loads(line), BundleManifest, _converter)
    except AnabranchError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"the bundle's manifest cannot be read: {error}") from None
    if manifest.line() != line:
        raise DataError("the bundle's manifest is not written as manifests are")
    return manifest


def _files(manifest: BundleManifest, rest: bytes) -> dict[str, bytes]:
    """The bytes of each file. Raises `DataError`."""
    if manifest.size_bytes != len(rest):
        raise DataError(f"the bundle has {len(rest)} bytes of files, its manifest {manifest.size_bytes}")
    found, begin = {}, 0
    for file in manifest.files:
        found[file.path] = rest[begin : begin + file.size_bytes]
        if hashlib.sha256(found[file.path]).hexdigest() != file.sha256:
            raise DataError(f"the bundle's file {file.path!r} is not the manifest's: its SHA-256 differs")
        begin += file.size_bytes
    return found


def _check_size(size_bytes: int, manifest_bytes: int = 0) -> None:
    """Raises `TooLarge`."""
    if size_bytes > BUNDLE_BYTES_MAX:
        raise TooLarge(
            f"a bundle of {size_bytes} bytes: at most {BUNDLE_BYTES_MAX // MIB} MiB travel so. It is for "
            "code; data lies on the devices, and weights come with the model"
        )
    if manifest_bytes > BUNDLE_MANIFEST_BYTES_MAX:
        most = BUNDLE_MANIFEST_BYTES_MAX
        raise TooLarge(f"the bundle's manifest has {manifest_bytes} bytes, at most {most}")
