"""`TransformersCallback`: a script with a `Trainer` of Hugging Face's becomes a device by one callback.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[ab.TransformersCallback("host:7070")])
    trainer.train()

`train()` then goes on until the run ends. Each task is as much training as the arguments say, by `max_steps`
or else `num_train_epochs`, and so is its schedule of the learning rate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import count
from typing import Any, Unpack

from transformers import ProgressCallback, TrainerCallback, get_scheduler
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from anabranch.api.live import InProcessServer
from anabranch.api.operated import Operated
from anabranch.api.participation import JoinOptions, Participation
from anabranch.client.summary import AgentSummary
from anabranch.core.errors import ConfigError
from anabranch.core.spelling import spelled
from anabranch.workloads.batches import batches_per_epoch
from anabranch.workloads.trainer import ENDLESS_STEPS


class TransformersCallback(TrainerCallback):
    """Makes the `Trainer` that it is given to a device of the federation that `server` serves.

    `epochs` (also a part of one) or `steps`: how much is trained for each task; else as the arguments say.
    The optimizer's state and the learning rate's schedule begin anew with each task, unless
    `keep_optimizer`. What was logged and evaluated since the task began is sent along. `options` are those of
    `join`. It must be among the trainer's `callbacks` when that is made. Raises `ConfigError`.
    """

    @spelled(JoinOptions)
    def __init__(
        self,
        server: str | Operated | InProcessServer,
        *,
        epochs: float = 0,
        steps: int = 0,
        keep_optimizer: bool = False,
        **options: Unpack[JoinOptions],
    ) -> None:
        if epochs and steps:
            raise ConfigError("TransformersCallback(epochs=..., steps=...): give one of them")
        self._device = Participation(server, keep_optimizer, options)
        self._epochs, self._steps, self._planned, self._examples = epochs, steps, 0, 0
        self._begun_with: Any = None  # the arguments of the trainer
        self._given: list[tuple[Any, dict[str, Any]]] = []  # to the trainer, and as it was then
        self._epoch_is_over = False
        self._metrics: dict[str, Any] = {}

    @property
    def summary(self) -> AgentSummary | None:
        """What the device has done, once `train()` has ended."""
        return self._device.summary

    # --- what the trainer calls --------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """From now on the trainer goes on without an end: how long a task is, was read before."""
        if not (self._epochs or self._steps):
            self._steps, self._epochs = max(args.max_steps, 0), args.num_train_epochs
        if self._steps == ENDLESS_STEPS:
            raise ConfigError("these TrainingArguments were another trainer's: make new ones")
        made = [given.get("optimizer"), given.get("lr_scheduler")]
        self._given = [(it, copy.deepcopy(it.state_dict())) for it in made if it is not None]
        self._begun_with, args.max_steps = args, ENDLESS_STEPS

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Join, and take the first task."""
        if self._begun_with is not args:
            raise ConfigError("give the callback to the trainer when that is made, among its callbacks")
        self._plan(args, train_dataloader)
        if not _length(train_dataloader):
            _go_round(train_dataloader)
        state.compute_steps(args, self._planned)  # what is logged and saved every part of a training
        self._renew(args, optimizer, lr_scheduler, was_used=state.global_step > 0)
        if not self._device.begin(model, args.world_size):
            control.should_training_stop = True
        if DEFAULT_PROGRESS_CALLBACK is ProgressCallback:  # a notebook's has to have a number
            state.max_steps = math.inf  # for the bar, which is made next: a count, without an end

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The bar is there: checkpoints have a number again."""
        state.max_steps = ENDLESS_STEPS

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The gradients are there."""
        self._device.pull()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """At the end of a task the loss since the last log is logged, so that it is known."""
        self._device.steps += 1
        self._epoch_is_over = False
        if self._is_due:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """What was logged; at the end of a task it is the first of up to three things."""
        self._metrics |= logs or {}
        self._turn(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """The second, where it is due."""
        self._metrics |= metrics or {}
        self._turn(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The third."""
        self._turn(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What is evaluated and saved at the end of an epoch comes next, or nothing."""
        self._epoch_is_over = True
        self._turn(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The run has ended, or something else has ended the training."""
        self._device.close()

    # -----------------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        return self._device.task is not None and self._device.steps >= self._planned

    def _plan(self, args: Any, dataloader: Any) -> None:
        """Local steps of a task, and examples."""
        of_step = args.train_batch_size * args.gradient_accumulation_steps
        batches = _length(dataloader)
        if not self._steps and not batches:
            raise ConfigError(
                "the training data do not say how many they are: say max_steps, or give the callback steps="
            )
        per_epoch = batches_per_epoch(batches, args.gradient_accumulation_steps)
        self._planned = self._steps or max(1, round(self._epochs * per_epoch))
        rows = _length(getattr(dataloader, "dataset", None))
        self._examples = min(rows or ENDLESS_STEPS, self._planned * of_step)

    def _renew(self, args: Any, optimizer: Any, schedule: Any, was_used: bool) -> None:
        """What each task begins with, whatever a checkpoint or an earlier training has left in it."""
        if not self._device.keeps:
            if was_used or optimizer.state_dict()["state"]:
                optimizer.load_state_dict(_unused(optimizer))
            for holder, state in self._given:
                holder.load_state_dict(copy.deepcopy(state))
        if all(holder is not schedule for holder, _ in self._given):
            _span(schedule, optimizer, args, self._planned, goes_on=self._device.keeps)
        self._device.remember((optimizer, schedule))

    def _turn(self, args: Any, state: Any, control: Any) -> None:
        """Push and take the next task, once nothing is left to do with this one's weights."""
        if not self._is_due or control.should_evaluate or control.should_save:
            return
        ends_epoch = float(state.epoch).is_integer() and not self._epoch_is_over
        if ends_epoch and "epoch" in (args.eval_strategy, args.save_strategy):
            return
        self._device.push(self._examples, self._metrics)
        self._metrics = {}
        if not self._device.take():
            control.should_training_stop = True


def _unused(optimizer: Any) -> dict[str, Any]:
    """The state of another one like this, which has made no step yet."""
    kind = type(getattr(optimizer, "optimizer", optimizer))  # behind what accelerate puts around it
    rate = optimizer.defaults["lr"]  # what a schedule by what is measured began with
    groups = [group | {"lr": group.get("initial_lr", rate)} for group in optimizer.param_groups]
    try:
        state: dict[str, Any] = kind(groups).state_dict()
    except Exception as error:  # of whatever kind: it is another's
        raise ConfigError(
            f"{kind.__name__} remembers an earlier training, and none like it can be made for each task "
            f"({error}): make a new Trainer and resume no checkpoint, or say keep_optimizer=True"
        ) from error
    return state


def _span(schedule: Any, optimizer: Any, args: Any, steps: int, goes_on: bool) -> None:
    """Let the trainer's own schedule, made for a training without an end, span a task's steps.

    It begins anew, unless it `goes_on` from where it is.
    """
    import torch

    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    alike = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])
    made = get_scheduler(
        args.lr_scheduler_type,
        alike,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    if isinstance(made, torch.optim.lr_scheduler.LambdaLR):  # others go by what is measured: without an end
        schedule.lr_lambdas = made.lr_lambdas
    if goes_on and schedule.last_epoch:
        return
    schedule.load_state_dict(made.state_dict())
    for group, other in zip(optimizer.param_groups, alike.param_groups, strict=True):
        group["lr"] = other["lr"]


def _go_round(dataloader: Any) -> None:
    """Let it begin anew where it ends.

    Of data that do not say how many they are a pass is to a trainer as many steps as the training has: here
    it would look for more of them without an end.
    """
    kind = type(dataloader)

    class Circling(kind):  # type: ignore[misc, valid-type]
        """The same one, whose iterator has no end."""

        def __iter__(self) -> Iterator[Any]:
            for number in count():
                if number and hasattr(self, "set_epoch"):
                    self.set_epoch(number)
                none = True
                for batch in super().__iter__():
                    none = False
                    yield batch
                if none:
                    return

    # Those of accelerate say another class than they have, and let none be given.
    vars(object)["__class__"].__set__(dataloader, Circling)


def _length(sized: Any) -> int:
    """0 where it does not say."""
    try:
        return len(sized)
    except TypeError:
        return 0
