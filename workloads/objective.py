"""What an App learns by, where it is not the cross entropy by SGD: its `loss`, `optimizer` and `metrics`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import AppError
from anabranch.core.model.metrics import MEASURED_MAX
from anabranch.core.model.updates import LocalPlan
from anabranch.support.own_code import own_name
from anabranch.workloads.metrics import metrics_of, number
from anabranch.workloads.sgd import LocalSgd

if TYPE_CHECKING:
    import torch

IGNORED = -100  # the label that torch's cross entropy passes over


@dataclass(frozen=True)
class Objective:
    """An App's own functions; None where it has none, and the default is used.

    `loss` takes (output, y) and gives one number, a mean; `optimizer` takes (params, plan) and gives a torch
    optimizer; `metrics` is a mapping of functions of (output, y), or one that gives such a mapping.
    """

    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any, LocalPlan], Any] | None = None
    metrics: Any = None
    name: str = "App"

    @classmethod
    def of(cls, app: Any) -> Objective:
        """That of an App. Raises `AppError` for what cannot be called."""
        metrics = app.metrics
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = own(app, "metrics")
        return cls(own(app, "loss"), own(app, "optimizer"), metrics, own_name(app))

    @property
    def trains_otherwise(self) -> str:
        """What makes a local step another than the default's; empty where nothing does."""
        return "loss" if self.loss is not None else "optimizer" if self.optimizer is not None else ""

    def make_optimizer(
        self, params: list[torch.nn.Parameter], plan: LocalPlan
    ) -> torch.optim.Optimizer | LocalSgd:
        """A new one for a task. Raises `AppError` where the App makes something else."""
        from torch import optim

        if self.optimizer is None:
            return LocalSgd(params, plan)
        if _is_class_of(self.optimizer, optim.Optimizer):
            made: Any = self.optimizer(params, lr=plan.learning_rate)  # type: ignore[call-arg]
        else:
            made = self.optimizer(params, plan)
        if not isinstance(made, optim.Optimizer):
            raise AppError(
                f"{self.name}.optimizer returned {type(made).__name__}: return a torch.optim.Optimizer"
            )
        if _needs(made.step):  # a step here is of one gradient, which a scale and a proximal term may change
            raise AppError(
                f"{self.name}.optimizer returned {type(made).__name__}, whose step() wants a closure that "
                "evaluates the loss again and again: return one that steps by a gradient, such as "
                "torch.optim.Adam, or give the App a train(self, model, examples, plan, seed) of its own"
            )
        return made

    def batch_loss(self, output: Any, y: Any) -> torch.Tensor:
        """The mean loss of a batch, a scalar. Raises `AppError` where the App's is none."""
        import torch

        if output is None:
            raise AppError(f"{self.name}: the model's forward returned nothing: return its output")
        if self.loss is None:
            self.check_labels(y)
            scores = self._scores(output)
            self._check_scores(scores, y)
            if tuple(y.shape[1:]) == (1,) and getattr(scores, "ndim", 0) == 2 and not y.is_floating_point():
                raise AppError(
                    f"{self.name}: y has shape (n, 1), and the default loss wants class numbers in the shape "
                    "(n,): give y.ravel()"
                )
            found: Any = self._cross_entropy(scores, y, "mean")
        else:
            found = self.loss(output, _like(output, y))
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = f"shape {tuple(found.shape)}" if hasattr(found, "shape") else type(found).__name__
            raise AppError(f"{self.name}.loss returned {what}: return one number as a tensor, the mean")
        return found.reshape(())

    def measured(self, output: Any, y: Any) -> tuple[dict[str, float], int]:
        """The sums over a batch, by name, and how many examples it has.

        `loss`, `accuracy` where outputs are scores of classes, and the App's metrics.
        """
        count, output = rows_of(y), self._scores(output)
        if self.loss is None and getattr(y, "ndim", 0) == 1 and not y.is_floating_point():
            self._check_scores(output, y)
            count = int((y != IGNORED).sum())  # as in training
            sums = {
                "accuracy": float(int((output.argmax(1) == y).sum())),
                "loss": float(self._cross_entropy(output, y, "sum")),
            }
        else:
            sums = {"loss": float(self.batch_loss(output, y)) * count}
            if self._is_of_classes(output, y):
                counted = y != IGNORED
                hits = int(((output.argmax(1) == y) & counted).sum())
                sums["accuracy"] = hits / max(1, int(counted.sum())) * count
        return sums | {name: value * count for name, value in self._own_metrics(output, y).items()}, count

    def _scores(self, output: Any) -> Any:
        """What the cross entropy is of, and metrics with it: `logits` of models of Hugging Face's."""
        return output if self.loss is not None else getattr(output, "logits", output)

    def check_labels(self, y: Any) -> None:
        """Raises `AppError` where the cross entropy has no use for the labels."""
        if not hasattr(y, "is_floating_point") or (y.ndim == 1 and y.is_floating_point()):
            what = f"{y.dtype}".removeprefix("torch.") if hasattr(y, "dtype") else type(y).__name__
            raise AppError(
                f"{self.name}: y is {what}, and the default loss, the cross entropy, wants class numbers "
                "(integers): for a regression give the App a loss, loss = torch.nn.functional.mse_loss"
            )

    def _cross_entropy(self, scores: Any, y: Any, reduction: str) -> torch.Tensor:
        """Raises `IndexError` for class numbers that the model has no score of."""
        from torch.nn.functional import cross_entropy

        try:
            return cross_entropy(scores, y, reduction=reduction)
        except IndexError as error:  # whoever calls the App says on which device
            known, count = y[y != IGNORED], scores.shape[1]
            raise IndexError(
                f"y has class numbers from {int(known.min())} to {int(known.max())}, and the model gives "
                f"{count} scores, of the classes 0 to {count - 1}: number classes from 0 on, and let the "
                "last layer have one output for each"
            ) from error

    def _check_scores(self, scores: Any, y: Any) -> None:
        """Raises `AppError` where the cross entropy of these has no meaning."""
        if not hasattr(scores, "is_floating_point"):
            many = f" of {len(scores)}" if hasattr(scores, "__len__") else ""
            raise AppError(
                f"{self.name}: the model's forward returned a {type(scores).__name__}{many}, and the default "
                "loss, the cross entropy, wants one tensor, the scores: return that alone, or give the App a "
                "loss(self, output, y), which takes from the output what it needs"
            )
        shape = tuple(getattr(scores, "shape", ()))
        if len(shape) >= 2 and shape[1] == 1:  # the cross entropy of one class is 0, whatever the weights
            raise AppError(
                f"{self.name}: the model gives one number for each example, {shape}, and the default loss, "
                "the cross entropy, wants a score for each class: for yes and no give it two outputs, for a "
                "regression give the App a loss, loss = torch.nn.functional.mse_loss"
            )
        if shape == tuple(y.shape) and len(shape) >= 2 and not y.is_floating_point():
            raise AppError(
                f"{self.name}: y has the shape of the scores, {shape}, and whole numbers; the default loss "
                "wants class numbers, y.argmax(1), of labels of which one holds; where several may hold give "
                "float labels and loss = torch.nn.functional.binary_cross_entropy_with_logits"
            )
        if shape[:-1] == tuple(y.shape) != (*shape[:1], *shape[2:]):
            raise AppError(
                f"{self.name}: the model's scores are {shape} and y is {tuple(y.shape)}: classes come last, "
                "and the default loss, the cross entropy, wants them second: for scores of each word give "
                "the App a loss, such as cross_entropy(scores.flatten(0, 1), y.flatten())"
            )

    def _is_of_classes(self, output: Any, y: Any) -> bool:
        if not hasattr(y, "is_floating_point") or y.is_floating_point() or not hasattr(output, "ndim"):
            return False
        scores = output.is_floating_point() and output.ndim >= 2 and output.shape[1] > 1
        same = output.ndim == y.ndim + 1 and (output.shape[0], *output.shape[2:]) == tuple(y.shape)
        # With a loss of its own, the second axis of a longer output may be anything.
        return bool(scores and same and (self.loss is None or y.ndim == 1))

    def _own_metrics(self, output: Any, y: Any) -> dict[str, float]:
        if self.metrics is None:
            return {}
        if isinstance(self.metrics, Mapping):
            found: Any = {name: function(output, y) for name, function in self.metrics.items()}
        else:
            found = self.metrics(output, y)
        where = f"{self.name}.metrics"
        if isinstance(found, Mapping):
            return metrics_of(found, where, MEASURED_MAX)
        return {"metric": number(found, where)}


def own(app: Any, name: str) -> Any:
    """An App's attribute that takes two arguments: a method, or a function that was put there as it is.

    `loss = torch.nn.functional.mse_loss` in a class would become a method, which gets the App as well; one
    that needs no third argument gets none, unless its first is called `self`. Raises `AppError` for what
    cannot be called.
    """
    found = getattr(app, name)
    if found is None:
        return None
    if not callable(found):
        raise AppError(f"{own_name(app)}.{name} is a {type(found).__name__}: give something to be called")
    if name == "loss" and inspect.isclass(found):
        kind = found.__name__
        raise AppError(f"{own_name(app)}.loss is the class {kind}: give an object of it, such as {kind}()")
    function = inspect.getattr_static(getattr(app, "adapted", app), name)
    if inspect.isfunction(function) and inspect.ismethod(found):
        return found if _needs(function) > 2 or _takes_self(function) else function
    return found


def rows_of(y: Any) -> int:
    """How many examples a batch has, by its labels."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(y)
    return next((len(leaf) for leaf in leaves if hasattr(leaf, "shape") and leaf.ndim), len(leaves))


def forward(model: torch.nn.Module, x: Any) -> Any:
    """The model's output: a batch that is a dict or a tuple gives its arguments."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


def _like(output: Any, y: Any) -> Any:
    """Labels that are no class numbers, in the precision of the output."""
    both = all(hasattr(t, "is_floating_point") and t.is_floating_point() for t in (output, y))
    return y.to(output.dtype) if both else y


def _needs(function: Any) -> int:
    """How many arguments a function cannot do without, by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _takes_self(function: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether a function's first argument is the object that it is a method of.

    Of a wrapper of any arguments, as decorators make them, whether the one function that it holds takes
    that; of several nobody knows which it wraps.
    """
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind is not inspect.Parameter.VAR_POSITIONAL:
        return first is not None and first.name.strip("_") == "self"
    around = (*around, function)
    held = [each for each in _held(function) if each not in around]
    return len(held) == 1 and _takes_self(held[0], around)


def _held(function: Any) -> Iterator[Any]:
    """The functions that a function has from where it was made."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it
            if inspect.isfunction(cell.cell_contents):
                yield cell.cell_contents


def _is_class_of(made: Any, base: type) -> bool:
    found = made.func if isinstance(made, partial) else made
    return isinstance(found, type) and issubclass(found, base)
