"""Whether weights can be loaded into a torch module: what is seen of it before the first training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import AppError
from anabranch.workloads.resident import place
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch


def check_loadable(module: torch.nn.Module, app: str) -> None:
    """Raises `AppError`, with the App's name, for tensors without a place and values of their own."""
    for name, tensor in _own_tensors(module):
        if flaw := _flaw(tensor):
            raise AppError(f"{app}: tensor {name!r} of its model {flaw}")


def check_no_copies(module: torch.nn.Module, app: str) -> None:
    """Raises `AppError` where the state dict gives copies, to which `Resident` would write in vain."""
    if copied := next(_copied(module), ""):
        raise AppError(
            f"{app}: its model's state_dict() gives a copy of {copied!r}, so that what a server sends would "
            "never get into the model: keep it as a parameter or a buffer, and give the tensors themselves"
        )


def check_all_names(module: torch.nn.Module, trained: Collection[str], app: str) -> None:
    """Raises `AppError` where `trained` has one name of a tensor and not another, under which it is frozen.

    What was trained would be overwritten, at the next task, by what the start had.
    """
    state = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel()}
    by_place = {place(state[name]): name for name in sorted(trained) if name in state}
    for name, tensor in state.items():
        own = by_place.get(place(tensor))
        if own is not None and name not in trained:
            raise AppError(
                f"{app}: trained says {own!r} and not {name!r}, which is the same tensor: "
                "name both, or neither"
            )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _flaw(tensor: Any) -> str:
    """Why nothing can be loaded into a tensor, and the mend; empty where it can."""
    torch = import_torch()
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet: in `model`, call what has lazy layers once, with an example"
    if tensor.is_meta:
        return "is on the meta device, without values: make the model on the CPU"
    if tensor.layout != torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}: keep it dense, by .to_dense()"
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded, several of its numbers are one in memory: register .clone() of it"
    return ""


def _copied(module: torch.nn.Module) -> Iterator[str]:
    """The names in the state dict of what is made anew at each call."""
    torch = import_torch()
    once, again = module.state_dict(), module.state_dict()
    for name, tensor in once.items():
        other = again[name]
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != other.data_ptr():
            yield name
