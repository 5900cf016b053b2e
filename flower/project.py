"""A Flower app's folder: what its `pyproject.toml` says, and the apps that it names.

[tool.flwr.app.components]      serverapp and clientapp, each "module:attribute"
[tool.flwr.app.config]          the run config; nested tables become keys with dots, as in Flower
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import AppError
from anabranch.flower.installed import flwr_version
from anabranch.support.own_code import told

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

PROJECT = "pyproject.toml"
RunConfig = dict[str, bool | int | float | str]


@dataclass(frozen=True)
class Project:
    """A folder with a Flower app. `run_config` is flat; `serverapp` is empty where none is named."""

    folder: Path
    name: str
    clientapp: str
    serverapp: str
    run_config: RunConfig

    @classmethod
    def read(cls, folder: Path) -> Project:
        """The app of a folder. Raises `AppError`, naming what is missing in its `pyproject.toml`."""
        file = folder.expanduser().resolve() / PROJECT
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise AppError(
                f"{file} cannot be read: name the folder of a Flower app ({error.strerror})"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise AppError(f"{file} is not TOML: {error}") from error
        app = data.get("tool", {}).get("flwr", {}).get("app", {})
        components = app.get("components", {})
        if not isinstance(components.get("clientapp"), str):
            raise AppError(
                f'{file} names no ClientApp: it needs clientapp = "module:app" in [tool.flwr.app.components]'
            )
        name = str(data.get("project", {}).get("name", file.parent.name))
        given = flat(app.get("config", {}), f"{file}: [tool.flwr.app.config]")
        return cls(file.parent, name, components["clientapp"], str(components.get("serverapp", "")), given)

    def fused(self, overrides: Mapping[str, Any]) -> RunConfig:
        """The run config with some keys overridden, as `flwr run --run-config` does. Raises `AppError`."""
        given = flat(overrides, "flower.run_config")
        if unknown := sorted(set(given) - set(self.run_config)):
            known = ", ".join(self.run_config) or "it has none"
            raise AppError(f"flower.run_config: {self.name} has no key {unknown[0]!r} ({known})")
        return {**self.run_config, **given}

    def client_app(self) -> ClientApp:
        """The ClientApp. Raises `AppError`."""
        flwr_version()
        from flwr.clientapp import ClientApp

        return self._load(self.clientapp, "clientapp", ClientApp)

    def server_app(self) -> ServerApp:
        """The ServerApp. Raises `AppError`."""
        flwr_version()
        from flwr.serverapp import ServerApp

        if not self.serverapp:
            raise AppError(
                f"{self.folder / PROJECT} names no ServerApp, which says what the first model is: "
                "start the server with a model that `anabranch init` wrote"
            )
        return self._load(self.serverapp, "serverapp", ServerApp)

    def _load(self, reference: str, what: str, kind: type[Any]) -> Any:
        found = load(reference, self.folder)
        if not isinstance(found, kind):
            raise AppError(
                f"{what} {reference!r} of {self.name} is a {type(found).__name__}, no {kind.__name__}"
            )
        return found


def load(reference: str, folder: Path | None = None) -> Any:
    """The object at `module:attribute`, with `folder` first on the import path, as Flower has it.

    Without one it is there already: Flower's own runtime has put it there. Raises `AppError`.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (colon and module_name and attribute):
        raise AppError(f'{reference!r} names no object: write "module:attribute"')
    if folder is not None:
        _refuse_namesake(module_name.partition(".")[0], folder)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
            found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        where = f" of {folder}" if folder else ""
        raise AppError(told(f"{reference!r}{where} cannot be loaded", error)) from error
    return found


def flat(tables: Mapping[str, Any], where: str, above: str = "") -> RunConfig:
    """Nested tables as one, their keys joined by dots. Raises `AppError` for a value that Flower has not."""
    found: RunConfig = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, where, f"{above}{key}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{above}{key}"] = value
        else:
            raise AppError(f"{where}: {above}{key} must be a number, a text or a truth value, not {value!r}")
    return found


def _refuse_namesake(package: str, folder: Path) -> None:
    """Python keeps one module of a name, so two apps in one process must not share theirs."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    inside = file is None or Path(file).resolve().is_relative_to(folder)
    if module is not None and not inside and (folder / package).exists():
        raise AppError(f"a package {package!r} was loaded from {file}: it hides the one in {folder}")
