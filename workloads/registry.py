"""From the name of an App to the object: one built in or installed, `module:App`, `path/to/file.py:App`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.core.errors import AppError
from anabranch.core.parts import PartKind
from anabranch.core.spelling import did_you_mean
from anabranch.support import code

BUILT_IN = {
    "fashion-mnist": "anabranch.workloads.fashion_mnist:FashionMnist",
    "fashion-mnist-resnet": "anabranch.workloads.fashion_mnist_resnet:FashionMnistResNet",
    "digits": "anabranch.workloads.digits:Digits",
    "synthetic": "anabranch.workloads.synthetic:Synthetic",
}
APPS = PartKind("App", "apps", ("run.workload",), BUILT_IN, needs=("model", "data"))

SETTINGS = (".toml", ".json")

# `flower:FOLDER`: what makes an App of another framework's; `bundle:FOLDER:module:App`: of a bundle that a
# device has opened. By name, as they lie above.
ADAPTERS = {
    "flower": "anabranch.flower.app:FlowerApp",
    "bundle": "anabranch.workloads.bundled:bundled_app",
}


def adapter_of(spec: str) -> tuple[Any, str] | None:
    """What makes the App of a `scheme:place`, called with the place and a data path; and the place."""
    scheme, colon, place = spec.partition(":")
    return (resolve(ADAPTERS[scheme]), place) if colon and scheme in ADAPTERS else None


def resolve(spec: str) -> Any:
    """The class, instance or module that `spec` names. Raises `AppError` naming what is missing."""
    if spec not in BUILT_IN and spec in APPS.names():
        return APPS.find(spec)
    where, attribute = _split(BUILT_IN.get(spec, spec))
    module = code.from_file(where) if where.endswith(".py") else _from_name(where, spec)
    if not attribute:
        return _app_of(module)
    return code.attribute(module, attribute, where, spec)


def check_installed(spec: str, what: str) -> None:
    """Raises `ConfigError` where an App that was found, in `what`, is neither built in nor installed."""
    if spec not in APPS.names():
        raise code.distrusted(what, "run.workload", spec)


def _split(spec: str) -> tuple[str, str]:
    where, colon, attribute = spec.rpartition(":")
    return (where, attribute) if colon and attribute.isidentifier() else (spec, "")


def _app_of(module: ModuleType) -> Any:
    found = getattr(module, "App", module)
    merely_imported = getattr(found, "__module__", "") == "anabranch.workloads.app"
    return module if merely_imported else found


def _from_name(name: str, spec: str) -> ModuleType:
    if Path(spec).suffix in SETTINGS and Path(spec).is_file():
        raise AppError(f"{spec} is a file of settings: name an App here, such as the one of its run.workload")
    if not all(part.isidentifier() for part in name.split(".")):
        _check_no_folder(spec)
        raise AppError(f"unknown workload {spec!r}; {_choices(spec)}")
    module = code.from_name(name, spec, f"; {_choices(spec)}")
    if getattr(module, "__file__", None) is None:  # Python takes any folder for a package
        _check_no_folder(spec)
    return module


def _check_no_folder(spec: str) -> None:
    if spec and Path(spec).is_dir():
        place = spec.rstrip("/")
        raise AppError(
            f"{spec} is a folder: of a Flower app write flower:{place} (or --flower {place}), of your own "
            f"App its file, such as {place}/app.py:App"
        )


def _choices(spec: str) -> str:
    names = APPS.names()
    files = [path.name for kind in SETTINGS for path in Path().glob(f"*{kind}")]
    near = did_you_mean(spec, [*names, *files])
    yours = "your own is module:App, path/to/file.py:App or flower:FOLDER"
    return f"{near and near + ' '}built in are {', '.join(names)}; {yours}"
