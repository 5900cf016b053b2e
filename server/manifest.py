"""What `anabranch init APP` writes and a server starts from: the model's layout and first weights.

A folder with two files: `manifest.json` (format, app, layout, initial_sha256, seed) and
`initial.safetensors`. Neither torch nor the app is needed to read it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from anabranch.compress.model import encode_model, frozen_apart, frozen_size_bytes
from anabranch.compress.registry import make_codec
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.units import UnitGroup
from anabranch.identity.files import make_private_folder, tighten
from anabranch.server.store.files import disk_errors, sync_file, sync_folder

FORMAT = 1
MANIFEST, INITIAL = "manifest.json", "initial.safetensors"
FIX = "write it again with `anabranch init APP --out DIR`"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Manifest:
    """The app by name, the layout of its model, and the tensors of version 0 in the layout's order.

    `seed`: the App builds these tensors from it; None where they came from elsewhere.
    """

    app: str
    spec: ParamSpec
    tensors: Mapping[str, Array]
    seed: int | None = None

    @property
    def vector(self) -> Vector:
        """The vector of version 0, shape (spec.size,); a new array."""
        return self.spec.flatten(self.tensors)

    @property
    def frozen(self) -> dict[str, Array]:
        """The tensors that no device changes."""
        return self.spec.frozen(self.tensors)

    @property
    def initial_sha256(self) -> str:
        """SHA-256 (hex) of the model of version 0 as it would travel, raw, and of what travels apart."""
        model = hashlib.sha256(encode_model(make_codec("raw"), self.spec, self.vector, self.frozen))
        model.update(frozen_apart(self.spec, self.frozen))
        return model.hexdigest()


def write_manifest(
    folder: Path,
    app: str,
    tensors: Mapping[str, Array],
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
    if not np.isfinite(manifest.vector).all():
        raise InvalidUpdate(f"the first weights of {app} are not finite: mend its model()")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INITIAL).write_bytes(save(dict(manifest.tensors)))
    head = {
        "format": FORMAT,
        "app": app,
        "layout": manifest.spec.to_json(),
        "initial_sha256": manifest.initial_sha256,
    } | ({} if seed is None else {"seed": seed})
    (folder / MANIFEST).write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_free(folder: Path, tensors: Mapping[str, Array], spec: ParamSpec) -> None:
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
        spec = manifest.spec
        make_private_folder(temporary)
        parts = spec.groups, spec.buffers, spec.slices
        write_manifest(temporary, manifest.app, manifest.tensors, *parts, manifest.seed, spec.stages)
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
        loaded = load(_read_capped(folder / INITIAL, _weights_bytes_max(spec, limits)))
        spec.check(loaded)
        tensors = {t.name: loaded[t.name] for t in spec.tensors}
        manifest = Manifest(str(head["app"]), spec, tensors, _seed(head))
        wrong = [t.name for t in spec.tensors if loaded[t.name].dtype.name != t.dtype]
    except (KeyError, TypeError, ValueError, SafetensorError, AnabranchError) as error:
        raise ConfigError(f"{folder}: the manifest is damaged ({error}); {FIX}") from error
    if wrong or manifest.initial_sha256 != head.get("initial_sha256"):
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


def read_weights(path: Path, spec: ParamSpec, limits: Limits = DEFAULT_LIMITS) -> dict[str, Array]:
    """The weights of the model `spec` in a safetensors file. Raises `ConfigError` for another model's."""
    try:
        loaded = load(_read_capped(path, _weights_bytes_max(spec, limits)))
        spec.check(loaded)
    except (SafetensorError, AnabranchError) as error:
        raise ConfigError(f"{path} has no weights of this model: {error}") from error
    if wrong := [t.name for t in spec.tensors if loaded[t.name].dtype.name != t.dtype]:
        raise ConfigError(f"{path}: {', '.join(wrong)} must be of the model's own type")
    return {t.name: loaded[t.name] for t in spec.tensors}


def _read_head(folder: Path, limits: Limits) -> dict[str, Any]:
    try:
        head = json.loads(_read_capped(folder / MANIFEST, limits.manifest_bytes_max))
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST} is not JSON ({error}); {FIX}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ConfigError(f"{folder / MANIFEST}: this program reads format {FORMAT}; {FIX}")
    return head


def _read_capped(path: Path, bytes_max: int) -> bytes:
    """A file's bytes, its size checked before it is read."""
    try:
        if path.stat().st_size > bytes_max:
            raise ConfigError(f"{path} is over the cap of {bytes_max} bytes; {FIX}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {FIX}") from error
