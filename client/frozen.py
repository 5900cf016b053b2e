"""What is frozen of a run's model, where that travels apart: fetched once, and kept by its digest.

It lies in `frozen/SHA256.safetensors` of the device's folder; that of another run goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.client.records import SUFFIX, UNFINISHED, Record, read_record, write_record
from anabranch.client.state import FROZEN
from anabranch.client.transport import Transport
from anabranch.compress.model import PART, frozen_sha256, read_frozen
from anabranch.core.errors import InvalidUpdate, ManifestMismatch
from anabranch.core.model.params import ParamSpec, Tensors


@dataclass(frozen=True)
class FrozenPart:
    """The frozen tensors of a run, and how many bytes came for them; 0 where they were here."""

    tensors: Tensors
    size_bytes: int = 0


def fetched_frozen(transport: Transport, spec: ParamSpec, sha256: str = "") -> FrozenPart:
    """What the server has. `sha256` (hex): what it must be, where that is known.

    Raises the errors of `Transport.fetch`, and `InvalidUpdate` for other tensors than those.
    """
    data = transport.fetch(spec.layout_hash, part_id=PART).data
    tensors = read_frozen(spec, memoryview(data))
    if sha256 and frozen_sha256(spec, tensors) != sha256:
        raise InvalidUpdate("the frozen tensors that came are not those of the manifest: its SHA-256 differs")
    return FrozenPart(tensors, len(data))


def built_frozen(spec: ParamSpec, own: Tensors, sha256: str) -> FrozenPart:
    """The App's own, in a run that sends none. `sha256` (hex): what they must be, where that is known.

    Raises `ManifestMismatch` where they are others.
    """
    if sha256 and not _is(spec, own, sha256):
        raise ManifestMismatch(
            "the run's frozen tensors are not sent (run.frozen = 'local'), and those that the App builds "
            f"here are others: SHA-256 {frozen_sha256(spec, own)[:16]}, in the run {sha256[:16]}; give "
            "the App the weights that the run began with, by --data-path or as it loads them"
        )
    return FrozenPart(own)


class FrozenFiles:
    """The frozen tensors in a device's folder."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FROZEN

    def get(
        self, transport: Transport, spec: ParamSpec, sha256: str, own: Tensors, served: bool = True
    ) -> FrozenPart:
        """Those of this digest: the App's `own`, those on the disk, or else the server's.

        Raises as `fetched_frozen`, `StoreError`, and `ManifestMismatch` where they are not `served`.
        """
        if _is(spec, own, sha256):
            return FrozenPart(own)
        if _is(spec, kept := self._kept(sha256), sha256):
            return FrozenPart(kept)
        if not served:
            return built_frozen(spec, own, sha256)
        found = fetched_frozen(transport, spec, sha256)
        self._keep(found.tensors, sha256)
        return found

    def _kept(self, sha256: str) -> Tensors:
        record = read_record(self._folder / f"{sha256}{SUFFIX}")
        return {} if record is None else record.arrays

    def _keep(self, tensors: Tensors, sha256: str) -> None:
        for old in [*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{UNFINISHED}")]:
            old.unlink()
        write_record(self._folder / f"{sha256}{SUFFIX}", Record(tensors, {}), durable=False)


def _is(spec: ParamSpec, tensors: Tensors, sha256: str) -> bool:
    """Whether these are all the frozen tensors, and of this digest."""
    wanted = {t.name: t.shape for t in spec.tensors if not t.aggregated}
    shapes = {name: array.shape for name, array in tensors.items()}
    return shapes == wanted and frozen_sha256(spec, tensors) == sha256
