"""`LightningCallback`: a script with a `Trainer` of Lightning's becomes a device by one callback.

    trainer = Trainer(max_epochs=1, callbacks=[ab.LightningCallback("host:7070")])
    trainer.fit(module, data)

`fit()` then goes on until the run ends. Each task is as much training as the trainer was told, by `max_steps`
or else `max_epochs`. A step is one of an optimizer, as Lightning counts them.
"""

from __future__ import annotations

import sys
from typing import Any, Unpack

from anabranch.api.live import InProcessServer
from anabranch.api.operated import Operated
from anabranch.api.participation import JoinOptions, Participation
from anabranch.client.summary import AgentSummary
from anabranch.core.errors import ConfigError
from anabranch.core.spelling import spelled
from anabranch.workloads.objective import rows_of

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # the same, by its former name
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

ENDLESS = -1
AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")  # and what is made of them


class LightningCallback(Callback):
    """Makes the script whose `Trainer` has it to a device of the federation that `server` serves.

    `epochs` or `steps`: how much is trained for each task; else as the trainer was told. Optimizers and
    schedules of learning rates begin anew with each task, unless `keep_optimizer`. What was logged in a
    task's training is sent along. `options` are those of `join`. Raises `ConfigError`.
    """

    @spelled(JoinOptions)
    def __init__(
        self,
        server: str | Operated | InProcessServer,
        *,
        epochs: int = 0,
        steps: int = 0,
        keep_optimizer: bool = False,
        **options: Unpack[JoinOptions],
    ) -> None:
        super().__init__()
        if epochs and steps:
            raise ConfigError("LightningCallback(epochs=..., steps=...): give one of them")
        self._device = Participation(server, keep_optimizer, options)
        self._epochs, self._steps = epochs, steps
        self._begun_at = self._epochs_done = self._rows = self._batches = 0
        self._loss: Any = 0.0

    @property
    def summary(self) -> AgentSummary | None:
        """What the device has done, once `fit()` has ended."""
        return self._device.summary

    # --- what the trainer calls --------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Before anything has asked how long the training is: as long as a task. Raises `ConfigError`."""
        if stage != "fit":
            return
        for other in trainer.callbacks:
            if any(kind.__name__ in AVERAGING for kind in type(other).__mro__):
                raise ConfigError(
                    f"LightningCallback beside {type(other).__name__}: that averages over a whole training, "
                    "in which tasks begin from other weights, and puts its average into the model at the "
                    "very end; leave it out: the server averages what devices push"
                )
        loop = trainer.fit_loop
        if not (self._epochs or self._steps):
            self._steps, self._epochs = max(loop.max_steps, 0), max(loop.max_epochs or 0, 0)
        if not (self._epochs or self._steps):
            raise ConfigError("say how long a task is: Trainer(max_epochs=...), or the callback's steps=")
        loop.epoch_loop.max_steps = self._steps or ENDLESS
        if not self._steps:
            loop.max_epochs = self._epochs
        elif loop.max_epochs != ENDLESS:  # as many as were told, if they are enough: each is a step at least
            loop.max_epochs = max(loop.max_epochs, self._steps)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Optimizers are made, no checkpoint has changed them yet, and from now on there is no end."""
        loop = trainer.fit_loop
        loop.max_epochs = loop.epoch_loop.max_steps = ENDLESS
        loop.min_epochs = loop.epoch_loop.min_steps = None
        self._remember(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join. What else has changed the optimizers since, such as a search for a learning rate, counts."""
        if trainer.ckpt_path is None:
            self._remember(trainer)
        self._started(trainer, self._device.begin(pl_module, trainer.world_size))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """After a task that took whole epochs: the next one."""
        if self._device.task is None and not trainer.should_stop:
            self._started(trainer, self._device.take())
        trainer.fit_loop.max_epochs = None  # for a bar, which comes next and says "Epoch 3/-2" else

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """The bar is there: what asks whether training is over needs a number."""
        trainer.fit_loop.max_epochs = ENDLESS

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """The gradients are there."""
        self._device.pull()

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """What the task has had so far; after its last step, the next one."""
        self._rows += rows_of(batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = self._loss + (0.0 if loss is None else loss.detach())
        self._batches += 1
        self._device.steps = trainer.global_step - self._begun_at
        if self._device.task is not None and 0 < self._steps <= self._device.steps:
            self._push(trainer)
            self._started(trainer, self._device.take())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """What a task of epochs has learned is pushed before anybody saves or restores anything."""
        trainer.fit_loop.max_epochs = ENDLESS  # of an epoch without a batch as well
        self._epochs_done += 1
        if self._device.task is not None and not self._steps and self._epochs_done >= self._epochs:
            self._push(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The run has ended, or something else has ended the training."""
        self._device.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """The task at hand goes to another device."""
        self._device.close()

    # -----------------------------------------------------------------------------------------

    def _remember(self, trainer: Any) -> None:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._device.remember([*trainer.optimizers, *schedules])

    def _started(self, trainer: Any, there_is_one: bool) -> None:
        """A task begins, or the run has ended."""
        self._begun_at, self._epochs_done, self._rows = trainer.global_step, 0, 0
        self._loss, self._batches = 0.0, 0
        if not there_is_one:
            trainer.should_stop = True

    def _push(self, trainer: Any) -> None:
        told = {"loss": self._loss / max(1, self._batches)} | dict(trainer.callback_metrics)
        self._device.push(min(self._rows, _examples(trainer)), told)


def _examples(trainer: Any) -> int:
    """How many the training data are, as far as they say it."""
    try:
        return len(trainer.train_dataloader.dataset)
    except (AttributeError, TypeError):
        return sys.maxsize
