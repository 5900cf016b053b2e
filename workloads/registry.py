"""From the name of an App to the object: built-in workloads, `module:App` and `path/to/file.py:App`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.core.errors import AppError
from anabranch.core.rng import seed_of
from anabranch.workloads.own_code import told

BUILT_IN = {
    "fashion-mnist": "anabranch.workloads.fashion_mnist:FashionMnist",
    "fashion-mnist-resnet": "anabranch.workloads.fashion_mnist_resnet:FashionMnistResNet",
    "digits": "anabranch.workloads.digits:Digits",
    "synthetic": "anabranch.workloads.synthetic:Synthetic",
}

# `flower:FOLDER`: what makes an App of another framework's. By name, as it lies in a layer above.
ADAPTERS = {"flower": "anabranch.flower.app:FlowerApp"}


def adapter_of(spec: str) -> tuple[Any, str] | None:
    """What makes the App of a `scheme:place`, called with the place and a data path; and the place."""
    scheme, colon, place = spec.partition(":")
    return (resolve(ADAPTERS[scheme]), place) if colon and scheme in ADAPTERS else None


def resolve(spec: str) -> Any:
    """The class, instance or module that `spec` names. Raises `AppError` naming what is missing."""
    where, attribute = _split(BUILT_IN.get(spec, spec))
    module = _from_file(where) if where.endswith(".py") else _from_name(where, spec)
    if not attribute:
        return _app_of(module)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AppError(f"{spec}: {where} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)


def _split(spec: str) -> tuple[str, str]:
    where, colon, attribute = spec.rpartition(":")
    return (where, attribute) if colon and attribute.isidentifier() else (spec, "")


def _app_of(module: ModuleType) -> Any:
    found = getattr(module, "App", module)
    merely_imported = getattr(found, "__module__", "") == "anabranch.workloads.app"
    return module if merely_imported else found


def _from_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise AppError(f"{path}: there is no such file")
    name = f"anabranch_app_{file.stem}_{seed_of(0, str(file)):x}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise AppError(f"{path}: Python cannot load it")
    _allow_imports_from(file.parent)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise AppError(told(f"{path}: it cannot be loaded", error)) from error
    return module


def _from_name(name: str, spec: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise AppError(f"unknown workload {spec!r}; {_choices(spec)}")
    _allow_imports_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise AppError(told(f"{spec}: it cannot be loaded", error)) from error
        raise AppError(f"{spec}: there is no module {error.name!r}; {_choices(spec)}") from error
    except (Exception, SystemExit) as error:
        raise AppError(told(f"{spec}: it cannot be loaded", error)) from error


def _choices(spec: str) -> str:
    near = difflib.get_close_matches(spec, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    yours = "your own is module:App, path/to/file.py:App or flower:FOLDER"
    return f"{hint}built in are {', '.join(BUILT_IN)}; {yours}"


def _allow_imports_from(folder: Path) -> None:
    """Let an App import its neighbours. Last in the path, so that it hides no installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
