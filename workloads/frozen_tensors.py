"""What of a torch module is not trained, as its App or its parameters say it; at which stage it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch.workloads.app import App
from anabranch.workloads.loadable import check_all_names
from anabranch.workloads.trainer import declared_trained

if TYPE_CHECKING:
    import torch


def still_names(module: torch.nn.Module) -> Iterator[str]:
    """The names in its state dict of parameters that require no gradient, and of buffers beside only such.

    A buffer, such as running statistics, goes with the parameters of the innermost module round it that has
    some; one that is in no module with parameters is not still.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            yield name
    for name, _ in module.named_buffers(remove_duplicate=False):
        if _is_still(module, name.rpartition(".")[0]):
            yield name


def _is_still(module: torch.nn.Module, path: str) -> bool:
    """Whether the innermost module with parameters from `path` outwards trains none of them."""
    wanted = [parameter.requires_grad for parameter in module.get_submodule(path).parameters()]
    if wanted or not path:
        return bool(wanted) and not any(wanted)
    return _is_still(module, path.rpartition(".")[0])


def freeze_others(app: App, module: torch.nn.Module) -> frozenset[str] | None:
    """What the App's `trained` names: these parameters require a gradient from here on, and no others.

    None where it leaves that to the parameters. Raises `AppError` for one of a tensor's several names.
    """
    declared = declared_trained(app, module)
    if declared is None:
        return None
    names = frozenset(declared)
    check_all_names(module, names, app.name)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            parameter.requires_grad_(False)
        elif parameter.is_floating_point():  # the spec refuses other kinds, by their names
            parameter.requires_grad_(True)
    return names


_held: set[int] = set()  # ids of parameters, as long as `training_only` keeps them as they are


def is_held(parameter: torch.nn.Parameter) -> bool:
    """Whether the task at hand trains others alone."""
    return id(parameter) in _held


@contextmanager
def training_only(module: torch.nn.Module, names: Collection[str] | None) -> Iterator[None]:
    """Inside, of the parameters only those of these names require a gradient; None: as they are.

    Where none of them has a gradient, all stay as they are: a loss must lead somewhere.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    kept = {id(p) for name, p in named if names is None or name in names}
    cleared = [p for _, p in named if p.requires_grad and id(p) not in kept]
    if not any(p.requires_grad and id(p) in kept for _, p in named):
        cleared = []
    for parameter in cleared:
        parameter.requires_grad_(False)
        parameter.grad = None  # or an optimizer would go on with the last one
    held = {id(parameter) for parameter in cleared}
    _held.update(held)
    try:
        yield
    finally:
        _held.difference_update(held)
        for parameter in cleared:
            parameter.requires_grad_(True)


@contextmanager
def at_stage(module: torch.nn.Module, stage: int) -> Iterator[None]:
    """Inside, `module.stage` is this one; 0: as it is."""
    if not stage:
        yield
        return
    before = module.stage
    module.stage = stage  # type: ignore[assignment]  # a number of the App's own
    try:
        yield
    finally:
        module.stage = before
