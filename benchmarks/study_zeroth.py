"""Do devices that only run the model forward learn? Gradients against slopes, at equal forward passes.

    python -m benchmarks.study_zeroth [--quick | --render]

Ten even devices learn upright digits, from a model that was trained on digits that lie on their side. What
they train is numbers of a subspace, by gradients or by slopes along random directions. A step by a gradient
costs three forward passes, a slope two. Each method has as many learning rates, on seeds that the comparison
does not use, judged by its accuracy at the end; then it runs on the paired seeds. Writes
`docs/studies/zeroth.md` and `.json`; `--quick` the same of less, into /tmp.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace
from benchmarks.equal_updates import Method, Study

NAME, UPDATES = "zeroth", 400
PASSES = 30  # forward passes of an update, where nothing else is said
EXACT_RATES = (4.0, 12.0, 36.0)
ZEROTH_RATES = (0.05, 0.15, 0.45)
FIRST = LocalPlan(steps=600, batch_size=32, learning_rate=0.2)

Tables = Mapping[str, Mapping[str, Any]]


class Upright(Digits):
    """Its start has learnt the digits turned by 90 degrees."""

    def model(self) -> Any:
        """The same on every device."""
        net = super().model()
        net.load_state_dict(_pretrained())
        return net


@lru_cache(maxsize=1)
def _pretrained() -> Any:
    from anabranch.workloads.torch_loop import TorchRuntime, sgd

    app, runtime = Digits(), TorchRuntime()
    with runtime.seeded(1):
        net = app.model()
    pool = app.data(Shard("train"))
    turned = np.rot90(pool.x.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64).copy()
    sgd(net, Examples(turned, pool.y), FIRST, 0, runtime)
    return net.state_dict()


class Numbers256(Subspace):
    """256 numbers in the place of 4,810 weights."""

    def __init__(self) -> None:
        super().__init__(Upright(), dimension=256)


class Numbers64(Subspace):
    """64 numbers."""

    def __init__(self) -> None:
        super().__init__(Upright(), dimension=64)


BASE: Tables = {
    "run": {
        "name": f"study-{NAME}",
        "updates_max": UPDATES,
        "evaluate_every_versions": 2,
        "keep_payloads": False,
    },
    "fleet": {"clients": 10},
    "strategy": {"name": "fedbuff", "buffer_size": 5},
    "client": {"batch_size": 32},
}


def _method(name: str, app: type, rates: tuple[float, ...], **client: Any) -> Method:
    workload = {"run": {"workload": f"{__spec__.name if __spec__ else __name__}:{app.__name__}"}}
    return Method(
        name, {f"rate {rate:g}": workload | {"client": client | {"learning_rate": rate}} for rate in rates}
    )


def methods() -> list[Method]:
    """Gradients first."""
    slopes: Any = {"gradient": "zeroth"}
    steps = PASSES // 2
    return [
        _method("256 numbers, gradients", Numbers256, EXACT_RATES, steps=PASSES // 3),
        _method("256 numbers, slopes", Numbers256, ZEROTH_RATES, **slopes, steps=steps),
        _method(
            "256 numbers, slopes, five a step",
            Numbers256, tuple(5 * r for r in ZEROTH_RATES), **slopes, steps=steps // 5, gradient_queries=5,
        ),
        _method(
            "256 numbers, slopes, four times the passes",
            Numbers256, ZEROTH_RATES, **slopes, steps=4 * steps,
        ),
        _method("64 numbers, gradients", Numbers64, EXACT_RATES, steps=PASSES // 3),
        _method("64 numbers, slopes", Numbers64, ZEROTH_RATES, **slopes, steps=steps),
    ]  # fmt: skip


STUDY = Study(
    name=NAME,
    title="training without gradients",
    command="python -m benchmarks.study_zeroth",
    about=f"""Ten even devices on the digits, FedBuff with a buffer of 5, from a start that has learnt the
digits turned by 90 degrees. Numbers of a [subspace](../subspace.md#without-gradients) are trained, by
gradients or by slopes. An update has {PASSES} forward passes of 32 examples, where nothing else is said: a
step by a gradient counts as three, a slope as two. Virtual seconds are no measure here: a simulated step
takes as long, whatever it is made of.""",
    base=BASE,
    methods=methods(),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
