"""What `anabranch init APP` writes and a server starts from: the model's layout and first weights.

A folder with two files: `manifest.json` (format, app, layout, initial_sha256, seed) and
`initial.safetensors`. Neither torch nor the app is needed to read it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from anabranch.compress.model import frozen_size_bytes, model_sha256
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate, check_format
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.arrays import Array, plain_tensors
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.units import UnitGroup
from anabranch.identity.files import make_private_folder, sync_folder, tighten, whose
from anabranch.server.store.files import disk_errors, sync_file
from anabranch.server.store.tensors import TensorFile, write_tensors

FORMAT = 1
MANIFEST, INITIAL = "manifest.json", "initial.safetensors"
FIX = "write it again with `anabranch init APP --out DIR`"


@dataclass(frozen=True)
class Manifest:
    """The app by name, the layout of its model, and the tensors of version 0 in the layout's order.

    Those that were read lie in their file, and are read anew at each look: a large model is held once, by the
    engine.
    `seed`: the App builds these tensors from it; None where they came from elsewhere.
    """

    app: str
    spec: ParamSpec
    tensors: Tensors
    seed: int | None = None

    @property
    def vector(self) -> Vector:
        """The vector of version 0, shape (spec.size,); a new array."""
        return self.spec.flatten(self.tensors)

    @property
    def frozen(self) -> dict[str, Array]:
        """The tensors that no device changes."""
        return self.spec.frozen(self.tensors)

    @cached_property  # a start asks for it several times, and a large model is read for it
    def initial_sha256(self) -> str:
        """SHA-256 (hex) of the model of version 0 as it would travel, raw, and of what travels apart."""
        return model_sha256(self.spec, self.tensors)


def write_manifest(
    folder: Path,
    app: str,
    tensors: Tensors,
    groups: tuple[UnitGroup, ...] = (),
    buffers: tuple[str, ...] = (),
    trained: Collection[str] | None = None,
    seed: int | None = None,
    stages: Iterable[ModelStage] = (),
) -> Manifest:
    """Write the manifest of an app's first weights.

    `groups`, `buffers`, `trained` and `stages` are as for `ParamSpec.of`; `seed`: see `Manifest`.

    Raises `InvalidUpdate` for weights that are not finite.
    """
    spec = ParamSpec.of(tensors, groups, buffers, trained, stages)
    manifest = Manifest(app, spec, plain_tensors(tensors), seed)
    _write(folder, manifest)
    return manifest


def _write(folder: Path, manifest: Manifest) -> None:
    tensors, seed = manifest.tensors, manifest.seed
    if flawed := manifest.spec.not_finite(tensors):
        raise InvalidUpdate(
            f"the first weights of {manifest.app} are not finite, in tensor {flawed!r}: mend its model(), or "
            "leave that out of trained(self, model)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{INITIAL}.tmp"  # not in its place: a server may be reading what is there
    with written.open("wb", buffering=0) as file:
        write_tensors(file, tensors)
    written.replace(folder / INITIAL)
    head = {
        "format": FORMAT,
        "app": manifest.app,
        "layout": manifest.spec.to_json(),
        "initial_sha256": manifest.initial_sha256,
    } | ({} if seed is None else {"seed": seed})
    (folder / MANIFEST).write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")


def check_free(folder: Path, tensors: Tensors, spec: ParamSpec) -> None:
    """Raises `ConfigError` where a folder holds another model than this: a run may have started from it.

    A manifest that is damaged holds no model.
    """
    try:
        held = read_manifest(folder)
    except ConfigError:
        return
    if held.initial_sha256 != Manifest("", spec, tensors).initial_sha256 or held.spec != spec:
        raise ConfigError(
            f"{folder} holds another model, of {held.app}, and a run may have started from it: "
            "write this one elsewhere with --out DIR, or replace that one with --force"
        )


def kept_manifest(data_dir: Path) -> Path:
    """Where a server keeps the manifest it was started with."""
    return data_dir / "manifest"


def keep_manifest(folder: Path, manifest: Manifest) -> None:
    """Keep a manifest durably, whole or not at all: what `verify` and `export` replay from.

    One that is there stays. One that cannot be read is replaced. Raises `StoreFull`, `DiskFailed`.
    """
    if _is_kept(folder, manifest):
        tighten(folder, *folder.iterdir())
        return
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with disk_errors("keeping the manifest"):
        make_private_folder(temporary)
        _write(temporary, manifest)
        for path in (temporary / INITIAL, temporary / MANIFEST):
            tighten(path)
            sync_file(path)
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)


def _is_kept(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder).initial_sha256 == manifest.initial_sha256
    except ConfigError:
        return False


def read_manifest(folder: Path, limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """The manifest in a folder. Raises `ConfigError`, naming what is wrong and how to mend it."""
    head = _read_head(folder, limits)
    try:
        spec = ParamSpec.from_json(head["layout"])
        tensors = _weights(folder / INITIAL, spec, limits)
        manifest = Manifest(str(head["app"]), spec, tensors, _seed(head))
        wrong = [t.name for t in spec.tensors if tensors.dtype(t.name).name != t.dtype]
        initial_sha256 = manifest.initial_sha256  # it reads the file
    except (KeyError, TypeError, ValueError, SafetensorError, AnabranchError) as error:
        raise ConfigError(f"{folder}: the manifest is damaged ({error}); {FIX}") from error
    if wrong or initial_sha256 != head.get("initial_sha256"):
        raise ConfigError(f"{folder / INITIAL} has other weights than {MANIFEST} says; {FIX}")
    check_frozen(spec, limits)
    return manifest


def _seed(head: Mapping[str, Any]) -> int | None:
    """Raises `ValueError` for what is no seed. An earlier release wrote none."""
    seed = head.get("seed")
    if seed is not None and type(seed) is not int:
        raise ValueError(f"seed is {seed!r}, no whole number")
    return seed


def check_frozen(spec: ParamSpec, limits: Limits) -> None:
    """Raises `ConfigError` for a model of which more is frozen than may travel."""
    size = frozen_size_bytes(spec)
    if size > limits.frozen_bytes_max:
        raise ConfigError(
            f"what is frozen of the model, which every device fetches once, has {size} bytes, more than "
            f"limits.frozen_bytes_max = {limits.frozen_bytes_max}: raise that, or have model() build less"
        )


def _weights_bytes_max(spec: ParamSpec, limits: Limits) -> int:
    return limits.payload_bytes_max + (limits.frozen_bytes_max if spec.apart else 0)


def read_weights(path: Path, spec: ParamSpec) -> dict[str, Array]:
    """The weights of the model `spec` in a safetensors file. Raises `ConfigError` for another model's."""
    try:
        most = _weights_bytes_max(spec, DEFAULT_LIMITS)
        loaded = load(_read_capped(path, most))  # at once: it may be a pipe
        spec.check(loaded)
    except KeyError as error:
        raise ConfigError(f"{path} has values of the type {error}, which cannot be read") from error
    except (SafetensorError, AnabranchError) as error:
        raise ConfigError(f"{path} has no weights of this model: {error}") from error
    if wrong := [t.name for t in spec.tensors if loaded[t.name].dtype.name != t.dtype]:
        raise ConfigError(f"{path}: {', '.join(wrong)} must be of the model's own type")
    return {t.name: loaded[t.name] for t in spec.tensors}


def _weights(path: Path, spec: ParamSpec, limits: Limits) -> TensorFile:
    """A file's tensors in the model's order. Raises `ManifestMismatch` for another model's."""
    _check_cap(path, _weights_bytes_max(spec, limits))
    with _readable(path):
        tensors = TensorFile(path)
    spec.check(tensors)
    tensors.arrange(t.name for t in spec.tensors)
    return tensors


def _read_head(folder: Path, limits: Limits) -> dict[str, Any]:
    try:
        head = json.loads(_read_capped(folder / MANIFEST, limits.manifest_bytes_max))
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST} is not JSON ({error}); {FIX}") from error
    said = head.get("format") if isinstance(head, dict) else None
    check_format(folder / MANIFEST, said, FORMAT)
    if not isinstance(head, dict) or said != FORMAT:
        raise ConfigError(f"{folder / MANIFEST}: this program reads format {FORMAT}; {FIX}")
    return head


def _read_capped(path: Path, bytes_max: int) -> bytes:
    """A file's bytes, its size checked before it is read."""
    _check_cap(path, bytes_max)
    with _readable(path):
        return path.read_bytes()


def _check_cap(path: Path, bytes_max: int) -> None:
    with _readable(path):
        if path.stat().st_size > bytes_max:
            raise ConfigError(f"{path} is over the cap of {bytes_max} bytes; {FIX}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = whose(path, error).strip(" ()") or FIX
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {fix}") from error
