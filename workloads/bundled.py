"""An App out of a bundle that was opened: a device names it to itself as `bundle:FOLDER:module:attribute`."""

from __future__ import annotations

from pathlib import Path

from anabranch.core.errors import AppError
from anabranch.support.bundled_code import from_bundle
from anabranch.support.code import attribute
from anabranch.workloads.app import App, app_of

SCHEME = "bundle"


def bundled_spec(folder: Path, entry: str) -> str:
    """How the App is named whose bundle lies unpacked in `folder`; `entry`: `module:attribute` in it."""
    return f"{SCHEME}:{folder}:{entry}"


def bundled_app(place: str, data_path: str = "") -> App:
    """The App of `FOLDER:module:attribute`. Raises `AppError`."""
    parts = place.rsplit(":", 2)
    if len(parts) != 3 or not all(parts):
        raise AppError(f"{SCHEME}:{place}: write {SCHEME}:FOLDER:module:attribute")
    folder, module, name = parts
    found = attribute(from_bundle(Path(folder), module), name, module, f"{module}:{name}")
    return app_of(found, f"{module}:{name}", data_path)
