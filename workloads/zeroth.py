"""Training without gradients, for devices that can only run the model forward: two losses tell a slope.

    g = (L(a + eps z) - L(a - eps z)) / (2 eps),    a <- a - lr g z

| symbol | meaning                                                | here                           |
|--------|--------------------------------------------------------|--------------------------------|
| a      | all that is trained, (K,): of a subspace its numbers   | `start`                        |
| z      | a direction, each -1 or +1, of the task's seed         | `signs`                        |
| L      | the loss of the step's batch, the same both times      | `loss_of`                      |
| eps    | how far it looks                                       | `client.gradient_eps`          |
| g      | the slope along z, cut to +-g_max where that is not 0  | `slope`, `client.gradient_max` |
| q      | directions of a step, whose estimates g z are averaged | `client.gradient_queries`      |

The mean of g z over all z is the gradient of a quadratic loss; one draw's variance is (K - 1) |gradient|^2.
SPSA, Spall 1992; of models MeZO (Malladi et al. 2023, arXiv 2305.17333), and federated Just One Byte (arXiv
2306.10015) and FedKSeed (2312.06353), whose a are the sums of the slopes: docs/subspace.md. No draw is
torch's: those differ between a CPU and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anabranch.core.config.ranges import ZEROTH
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import AppError
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import random_words, seed_of
from anabranch.workloads.batches import batches, planned_steps

if TYPE_CHECKING:
    import torch

    from anabranch.workloads.app import App, Array, Examples

NUMBER = 5  # of this use of the generator: see `subspace.NUMBER`

Loss = Callable[[Vector], float]


@dataclass(frozen=True)
class Zeroth:
    """How slopes are found; `most` 0: no bound on them."""

    eps: float = ClientTable.gradient_eps
    most: float = ClientTable.gradient_max
    queries: int = ClientTable.gradient_queries

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Zeroth | None:
        """Of a run's tables; None where it trains by gradients, as all runs of older releases."""
        client = config.get("client", {})
        if client.get("gradient") != ZEROTH:
            return None
        own = {"eps": "gradient_eps", "most": "gradient_max", "queries": "gradient_queries"}
        return cls(**{name: client[key] for name, key in own.items() if key in client})

    def estimate(self, loss_of: Loss, start: Vector, seed: int, step: int) -> tuple[Vector, float]:
        """The gradient at `start`, estimated, and the loss: means over the directions of a step."""
        found, total = np.zeros_like(start), 0.0
        for query in range(self.queries):
            z = signs(seed, step, query, start.size).astype(start.dtype)
            g, loss = slope(loss_of, start, z, self.eps)
            cut = float(np.clip(g, -self.most, self.most)) if self.most else g
            found += cut / self.queries * z
            total += loss
        return found, total / self.queries


def slope(loss_of: Loss, start: Vector, z: Vector, eps: float) -> tuple[float, float]:
    """The central difference along z, and the mean of its two losses."""
    ahead, behind = loss_of(start + eps * z), loss_of(start - eps * z)
    return (ahead - behind) / (2 * eps), (ahead + behind) / 2


def signs(seed: int, step: int, query: int, count: int) -> npt.NDArray[np.int8]:
    """-1 or +1 for each number, (count,): bits of Philox 4x64-10 with the key (seed, 5), the lowest first.

    Its counter has blocks of four words in its lowest 64 bits, the step above, then the query.
    """
    at = query << 128 | step << 64
    words = random_words(seed, NUMBER, at).random_raw(-(-count // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=count, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


def train(app: App, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
    """Train `model` in place as `plan` says, with slopes in the place of gradients.

    Metrics: `loss` (mean), `steps`. Raises `AppError` where there is no loss to call.
    """
    zeroth, loss = app.zeroth or Zeroth(), loss_to_call(app, model)
    if isinstance(model, dict):
        return _of_arrays(app, model, examples, plan, seed, zeroth, loss)
    return _of_module(app, model, examples, plan, seed, zeroth, loss)


def loss_to_call(app: App, model: Any) -> Callable[[Any, Any], Any]:
    """The mean loss of `model` on a batch (x, y): the App's `batch_loss`, else what the default lowers.

    Raises `AppError` where an App has neither: its own training may be of anything.
    """
    from anabranch.workloads.app import has_own
    from anabranch.workloads.objective import Objective, forward

    if callable(app.batch_loss):
        return lambda x, y: app.batch_loss(model, x, y)
    what = "a model of numpy arrays" if isinstance(model, dict) else "a train of its own"
    if isinstance(model, dict) or has_own(app, "train"):
        raise AppError(
            f"client.gradient = 'zeroth' has no loss to call: {app.name} has {what}. Write batch_loss(self, "
            "model, x, y), the mean loss of a batch, or set client.gradient = 'exact'"
        )
    objective = Objective.of(app)
    return lambda x, y: objective.batch_loss(forward(model, x), y)


def _of_module(
    app: App,
    model: torch.nn.Module,
    examples: Examples,
    plan: LocalPlan,
    seed: int,
    zeroth: Zeroth,
    loss: Callable[[Any, Any], Any],
) -> dict[str, float]:
    """Of a torch module, by the App's optimizer. In full precision: a difference of losses has few digits."""
    from anabranch.workloads.adapters import check_turns
    from anabranch.workloads.app import examples_of
    from anabranch.workloads.objective import Objective
    from anabranch.workloads.torch_loop import (
        examples_dtype,
        import_torch,
        proximal_pull,
        trained_parameters,
    )

    torch_, runtime = import_torch(), app.runtime
    check_turns(model)
    params = trained_parameters(model)
    optimizer = Objective.of(app).make_optimizer(params, plan)
    pull = proximal_pull(params, plan.proximal_mu) if plan.proximal_mu else None
    total, steps = 0.0, 0
    model.train()
    with runtime.seeded(seed), torch_.no_grad():
        for x, y in runtime.batches(examples_of(examples), plan, seed, examples_dtype(model)):
            drawn = seed_of(seed, "zeroth", steps)

            def loss_of(values: Vector, x: Any = x, y: Any = y, drawn: int = drawn) -> float:
                _put(params, values)
                with runtime.seeded(drawn):  # dropout is the same both times
                    return float(loss(x, y))

            start = torch_.nn.utils.parameters_to_vector(params).cpu().numpy()
            gradient, batch_loss = zeroth.estimate(loss_of, start, seed, steps)
            _put(params, start)
            for param, part in zip(params, _parts(params, gradient), strict=True):
                param.grad = part
            if pull is not None:
                pull()
            optimizer.step()
            total, steps = total + batch_loss, steps + 1
    optimizer.zero_grad(set_to_none=True)
    return {"loss": total / max(1, steps), "steps": float(steps)}


def _put(params: list[torch.nn.Parameter], values: Vector) -> None:
    for param, part in zip(params, _parts(params, values), strict=True):
        param.copy_(part)


def _parts(params: list[torch.nn.Parameter], values: Vector) -> list[torch.Tensor]:
    """The values of each parameter, where and as it is."""
    import torch

    whole = torch.from_numpy(values).to(params[0].device)
    parts = torch.split(whole, [p.numel() for p in params])
    return [part.view_as(p).to(p) for p, part in zip(params, parts, strict=True)]


def _of_arrays(
    app: App,
    model: dict[str, Array],
    examples: Examples,
    plan: LocalPlan,
    seed: int,
    zeroth: Zeroth,
    loss: Callable[[Any, Any], Any],
) -> dict[str, float]:
    """Of a dict of arrays: SGD with momentum, weight decay and the proximal term."""
    held = {*(app.buffers(model) or ())}
    named = app.trained(model)
    names = [
        n for n, a in model.items() if a.dtype.kind == "f" and n not in held and (named is None or n in named)
    ]
    ends = np.cumsum([model[n].size for n in names])[:-1]

    def put(values: Vector) -> None:
        for name, part in zip(names, np.split(values, ends), strict=True):
            model[name][...] = part.reshape(model[name].shape)

    def taken() -> Vector:
        return np.concatenate([np.ravel(model[name]) for name in names])

    first, total = taken(), 0.0
    velocity = np.zeros_like(first)
    for step, rows in enumerate(batches(len(examples), plan, seed)):
        x, y = examples.x[rows], examples.y[rows]

        def loss_of(values: Vector, x: Array = x, y: Array = y) -> float:
            put(values)
            return float(loss(x, y))

        start = taken()
        gradient, batch_loss = zeroth.estimate(loss_of, start, seed, step)
        velocity = plan.momentum * velocity + gradient
        velocity += plan.weight_decay * start + plan.proximal_mu * (start - first)
        put(start - plan.learning_rate * velocity)
        total += batch_loss
    steps = planned_steps(plan, len(examples))
    return {"loss": total / max(1, steps), "steps": float(steps)}
