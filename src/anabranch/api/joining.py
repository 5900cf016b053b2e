"""`join`: an existing training script becomes a device of a federation.

    fed = anabranch.join("host:7070", model)
    for task in fed:
        train(model, ...)
        fed.push(examples=len(data), metrics={"loss": loss})

Behind the loop is the device of `anabranch client`: what was pushed is on the disk before it is sent,
survives a restart of either side, and counts once. That device runs in a thread of its own; the script's
code, in the thread that calls it, and nobody else touches its model.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import queue
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from anabranch.api.devices import Client
from anabranch.api.live import InProcessServer
from anabranch.api.operated import Operated
from anabranch.client.stopping import Interrupted
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.limits import COHORT_MIN
from anabranch.core.model.metrics import TRAINED_MAX, names_flaw
from anabranch.core.model.updates import LocalPlan
from anabranch.core.spelling import spelled
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import each_step
from anabranch.workloads.frozen_tensors import training_only
from anabranch.workloads.trainer import ENDLESS_STEPS

log = logging.getLogger(__name__)

COUNTS = ("steps", "examples")  # metrics that mean something else to a server
METRICS_MAX = TRAINED_MAX - len(COUNTS) - 1  # and the time that it took
SHORT = "torch.bfloat16"  # of a script's model: what travels is float32
LOOK_S = 0.1  # so often it is looked whether the task at hand is still wanted

Weights = dict[str, Any]  # of torch, or arrays of numpy, by name


@dataclass(frozen=True)
class JoinedTask:
    """What the model is to be trained for: from `version`, whose weights it has now.

    `plan` is what the server would have a device do, which a script is free to do in another way: epochs,
    batch size, learning rate, and `proximal_mu`, the weight of a proximal term that some strategies count on.
    `seed` is this task's own.
    """

    version: int
    plan: LocalPlan
    seed: int


@dataclass(frozen=True)
class _Handed:
    """From the device's thread: a task, and the weights that it starts from.

    `trained`: the names of the parameters that are trained for it, in `part` where those are not all that
    the script trains.
    """

    task: JoinedTask
    weights: Weights
    trained: frozenset[str]
    part: bool


@dataclass(frozen=True)
class _Trained:
    """From the script's thread: what came of it."""

    task: JoinedTask
    weights: Weights
    metrics: Mapping[str, float]


class _Script(App):
    """The script as an App: `train` hands the task over and waits for what comes of it."""

    name = "script"

    def __init__(self, model: Any, examples: int) -> None:
        super().__init__()
        self._model, self._examples = model, examples
        self.handed: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[_Trained] = queue.SimpleQueue()
        self.closed = False
        self._at_work: JoinedTask | None = None  # of the device, as long as a result may come to its disk
        self._settled = threading.Event()
        self._trained = parameter_names(model, trained=True)  # for a task of the whole model

    def model(self) -> Any:
        """A copy of the script's model, in kinds that travel: what it starts from is the server's."""
        found = copy.deepcopy(self._model)
        if hasattr(found, "parameters"):
            for tensor in (*found.parameters(), *found.buffers()):
                if str(tensor.dtype) == SHORT:
                    tensor.data = tensor.data.float()
        return found

    def data(self, shard: Shard) -> Examples:  # noqa: ARG002 - the contract's
        """As many as the script says; it alone has them."""
        return Examples(np.zeros((self._examples, 1), np.int8), np.zeros(self._examples, np.int8))

    def train(
        self,
        model: Any,
        examples: Examples,  # noqa: ARG002 - the script has its own
        plan: LocalPlan,
        seed: int,
    ) -> dict[str, float]:
        """Raises what ends the device, or the task, while the script trains."""
        trains_on = plan.steps >= ENDLESS_STEPS
        if trains_on:  # a pass of the script is a part of the device's only training
            plan = replace(plan, steps=0)
        task = JoinedTask(self.version, plan, seed)
        self._settled.clear()
        self._at_work = None if trains_on else task
        names = parameter_names(model, trained=True)
        self.handed.put(_Handed(task, taken(model), names, names != self._trained))
        while True:
            leaving = self.closed  # what the script has pushed, it had pushed before
            try:
                found = self.results.get(timeout=0 if leaving else LOOK_S)
            except queue.Empty:
                if leaving:
                    raise Interrupted("the script has left") from None
                if not trains_on:  # else what is merged in the midst of a pass would never come to the script
                    with suppress(Interrupted):  # which comes of leaving
                        each_step()
                continue
            if found.task is task:  # what was pushed for one that was cancelled is nobody's
                break
        put(found.weights, model)
        return dict(found.metrics)

    def hear(self, kind: str, **data: Any) -> None:
        """What the device does: once a training is over, its result is on the disk or never will be."""
        if kind in ("trained", "cancelled") or (kind, data.get("call")) == ("failed", "train"):
            self._at_work = None
            self._settled.set()

    def give(self, result: _Trained, device: _Device) -> None:
        """From the script's thread: what came of a task. Returns once it is on the disk, or of no use.

        A device that trains on takes it when the next exchange is due: that is not waited for.
        """
        self.results.put(result)
        while self._at_work is result.task and not device.over:
            self._settled.wait(LOOK_S)


class _Device(Client):
    """The device behind a script's loop, at most one of a folder in a process."""

    def __init__(self, script: _Script, *args: Any, **options: Any) -> None:
        super().__init__(script, *args, **options)
        self._script = script

    def take_over(self) -> None:
        """Begin, in the place of the loop that this process has had in the folder, if one goes on there.

        As a notebook has it where a cell was interrupted and is run again: the traceback keeps the old loop.
        """
        folder = self._options.state_dir.resolve()
        if (earlier := _devices.get(folder)) is not None and not earlier.over:
            log.warning("%s: this process joins anew, so its earlier loop there ends", folder)
            earlier.leave()
            with suppress(Exception):  # what was wrong with it is nothing to the new one
                earlier.wait()
        _devices[folder] = self
        self.start()

    def _listener(self, otherwise: OnEvent | None = None) -> OnEvent:
        others = super()._listener(otherwise)

        def hear(kind: str, **data: Any) -> None:
            self._script.hear(kind, **data)
            if others is not None:
                others(kind, **data)

        return hear

    def _end(self) -> None:
        self._script.closed = True
        super()._end()


# By folder; the thread of each keeps it.
_devices: weakref.WeakValueDictionary[Path, _Device] = weakref.WeakValueDictionary()


@atexit.register
def _leave_all() -> None:
    """A process that ends waits until what it has pushed is on the disk."""
    devices = list(_devices.values())
    for device in devices:
        device.leave()
    for device in devices:
        with suppress(Exception):  # the script is over: nobody is left to hear of it
            device.wait()


class JoinedFederation:
    """See the module: iterated once, by one thread. Also a context manager; `close` leaves the federation.

    `summary` is what this device has done, once the loop has ended.
    """

    def __init__(self, client: _Device, script: _Script, model: Any) -> None:
        self._client, self._script, self._model = client, script, model
        self._form = form_of(model)
        self._handed: _Handed | None = None  # for the task at hand
        self._started = self._told_unmoved = False
        self._still = ExitStack()  # of what is kept as it is for the task at hand
        # A script that simply ends leaves the federation: what it has pushed stays in its folder until then.
        self._leave = weakref.finalize(self, client.leave)

    @property
    def summary(self) -> AgentSummary | None:
        """None as long as the loop goes on."""
        return self._client.summary

    def __iter__(self) -> Iterator[JoinedTask]:
        """Task after task, until the run ends; the model has the weights of each.

        Raises what makes going on senseless: `ManifestMismatch` where the run is of another model,
        `IdentityError`, `ConfigError` and the like. While no server can be reached, it waits.
        """
        self._start()
        while True:
            if self._handed is not None:
                raise ConfigError(
                    f"the task from version {self._handed.task.version} was not pushed: call "
                    "push(examples=..., metrics=...) before the next one, or break out of the loop"
                )
            handed = self._next()
            if handed is None:
                self._client.wait()
                return
            _check_form("the next task", form_of(self._model), self._form)
            put(handed.weights, self._model)
            if handed.part:
                self._still.enter_context(training_only(self._model, handed.trained))
            self._handed = handed
            yield handed.task

    def push(self, examples: int, metrics: Mapping[str, Any] | None = None, steps: int = 0) -> None:
        """Give the model as it is now for the task at hand; it may be changed at once.

        `examples`: on how many it was trained, which weighs it. `metrics` are numbers of its training.
        `steps`: local steps, where that is not what the plan says. It returns once the result is in the
        device's folder, before the server has it: from there it is sent as soon as it can be, again and again
        if need be. Raises `ConfigError` where no task is at hand, the model has other tensors than when it
        joined, a frozen one has changed, or what is said of it cannot be sent: then the task is still at
        hand; and in a process that was forked inside the loop.
        """
        self._client.check_here()
        if self._handed is None:
            raise ConfigError("push() is once for each task of `for task in fed:`: there is none at hand")
        told = _told(examples, metrics, steps)
        weights = taken(self._model)
        _check_form("push()", form_of(weights), self._form)
        _check_still(weights, self._handed, self._model)
        result = _Trained(self._handed.task, _as_handed(weights, self._handed.weights), told)
        if not self._told_unmoved and not _has_moved(result.weights, self._handed.weights):
            self._told_unmoved = True
            log.warning(
                "push(): the model is as the task gave it: what is trained must be the model that join() was "
                "given, in place (this is said once)"
            )
        self._still.close()
        self._handed = None
        self._script.give(result, self._client)

    def close(self) -> None:
        """Leave: a task without a result is given back, a result that waits stays for the next start."""
        self._still.close()
        self._leave()
        if self._started:
            self._client.stop()

    def _start(self) -> None:
        if self._started:
            raise ConfigError("a federation is joined once: call join() again for another loop")
        check_alone(_processes())
        self._started = True
        self._client.take_over()

    def _next(self) -> _Handed | None:
        """The next task; None once the device has ended. Raises `ConfigError` as `check_here` does."""
        self._client.check_here()  # a copy may have a task at hand that was for the loop it was forked from
        while True:
            try:
                return self._script.handed.get(timeout=LOOK_S)
            except queue.Empty:
                if self._client.over:
                    return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@spelled()
def join(
    server: str | Operated | InProcessServer,
    model: Any,
    *,
    id: str = "",  # noqa: A002 - as the command's option
    examples: int = 1,
    state_dir: str | Path | None = None,
    tasks_max: int = 0,
    token: str = "",
    ca_sha256: str = "",
    join: str = "",
    insecure: bool = False,
    keepers: Sequence[str] = (),
    cohort_min: int = COHORT_MIN,
) -> JoinedFederation:
    """Make the script that calls this a device of the federation that `server` serves, `host:port`.

    `model` is a torch module, wherever it lies, or a dict of numpy arrays; its tensors must have the names,
    shapes and kinds of the run's, but for those in bfloat16, which are float32 in the run. `examples`: how
    many this device has, as far as that is known before. The rest is as for `Client`; the device's name and
    what it has not sent yet lie in `state_dir`, so that a script that is started again goes on. Of one folder
    a process has one loop: a later one ends it.
    Raises `AppError` for a model that is none, `ConfigError` for less than one example, and as `Client`.
    """
    if isinstance(model, type):
        raise AppError(f"model is the class {model.__name__}: give an object of it, {model.__name__}(...)")
    script = _Script(model, examples)
    client = _Device(
        script,
        server,
        id=id,
        state_dir=state_dir,
        device="cpu",  # of the copy that travels
        tasks_max=tasks_max,
        token=token,
        ca_sha256=ca_sha256,
        join=join,
        insecure=insecure,
        keepers=keepers,
        cohort_min=cohort_min,
    )
    _check_joined(model, examples)
    return JoinedFederation(client, script, model)


def _check_joined(model: Any, examples: Any) -> None:
    if not (isinstance(model, dict) or (hasattr(model, "state_dict") and hasattr(model, "load_state_dict"))):
        raise AppError(f"model is a {type(model).__name__}: give a torch module, or a dict of numpy arrays")
    if not isinstance(examples, Integral) or int(examples) < 1:
        raise ConfigError(f"join(examples={examples!r}): give how many this device has, at least 1")


def check_alone(processes: int) -> None:
    """Whether one process trains the model. Raises `ConfigError`.

    Several add their gradients up, from the weights that each has: a task's would be those of one.
    """
    if processes > 1:
        raise ConfigError(
            f"{processes} processes train this model, and a device is one: start the script in one process, "
            "or, for a device in each, without torch's process group and with an id of its own"
        )


def _processes() -> int:
    """Of torch's process group, where the script has one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


def taken(model: Any) -> Weights:
    """The model's tensors, copied: of torch in a computer's memory."""
    if isinstance(model, dict):
        return {name: np.array(array) for name, array in model.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def form_of(model: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors; of what is no model there are none."""
    tensors = model if isinstance(model, dict) else model.state_dict() if hasattr(model, "state_dict") else {}
    return {name: tuple(np.shape(tensor)) for name, tensor in tensors.items()}


def _check_form(
    where: str, found: Mapping[str, tuple[int, ...]], joined: Mapping[str, tuple[int, ...]]
) -> None:
    for name in dict.fromkeys([*joined, *found]):
        if found.get(name) != joined.get(name):
            now, then = (str(form.get(name, "not there")) for form in (found, joined))
            raise ConfigError(
                f"{where}: the model's tensor {name!r} is {now}, and was {then} when it joined: a model "
                "keeps its tensors and their shapes"
            )


def _as_handed(weights: Weights, handed: Weights) -> Weights:
    """The weights in the kinds of numbers that the run has: what was handed, and what training has changed.

    A model that holds fewer digits, as one in bfloat16, rounds as it takes weights over. Sent, that would be
    a change of all weights, and by all devices at once.
    """
    found = dict(weights)
    for name, now in weights.items():
        given = handed[name]
        if now.dtype != given.dtype and not isinstance(now, np.ndarray):
            found[name] = given + (now.to(given.dtype) - given.to(now.dtype).to(given.dtype))
    return found


def _check_still(weights: Weights, handed: _Handed, model: Any) -> None:
    """What is not trained is in no update, and with the next task is as it was. Raises `ConfigError`."""
    for name in sorted(parameter_names(model) & weights.keys() - handed.trained):
        given = handed.weights[name].to(weights[name].dtype)  # as a model that was cast holds it
        if not weights[name].allclose(given, rtol=0, atol=0, equal_nan=True):
            raise ConfigError(
                f"push(): {name!r} has changed, and the task trains other tensors, so that the change would "
                "be lost: let what is trained later require a gradient when the run begins and the script "
                "joins, and freeze it in the loop; keep an average of weights, such as a momentum encoder, "
                "outside of the model"
            )


def _has_moved(weights: Weights, handed: Weights) -> bool:
    return any(not np.array_equal(now, handed[name]) for name, now in weights.items())


def _told(examples: Any, metrics: Any, steps: Any) -> dict[str, float]:
    """What a push says of its training. Raises `ConfigError`: the device would end by it."""
    told = _metrics(metrics)
    if flaw := names_flaw(told, METRICS_MAX):
        raise ConfigError(f"push(metrics=...): {flaw}")
    told |= {"examples": _count(examples)} | ({"steps": _number("steps=...): it", steps)} if steps else {})
    if not 0 <= told.get("steps", 0) < math.inf:
        given = "steps" if steps else "metrics"
        raise ConfigError(
            f"push({given}=...): there were {told['steps']!r} steps: give how many local steps were made"
        )
    return told


def _count(examples: Any) -> float:
    try:
        count = float(examples)
    except (TypeError, ValueError):
        what = type(examples).__name__
        raise ConfigError(
            f"push(examples=...) is a {what}: give on how many examples the model was trained; which model, "
            "join() was told"
        ) from None
    if not 1 <= count < math.inf:
        raise ConfigError(f"push(examples={examples!r}): give at least 1, and as many as there were")
    return count


def _metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        what = type(metrics).__name__
        raise ConfigError(f'push(metrics=...) is a {what}: give numbers by name, such as {{"loss": loss}}')
    return {str(name): _number(f"metrics=...): {name!r}", value) for name, value in (metrics or {}).items()}


def _number(what: str, value: Any) -> float:
    """Of Python, of numpy, or a tensor of one."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"push({what} is {value!r}, and no number") from error


def parameter_names(model: Any, trained: bool = False) -> frozenset[str]:
    """Of a torch module, all or those that require a gradient; of anything else none are known."""
    if not hasattr(model, "named_parameters"):
        return frozenset()
    parameters = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, it in parameters if it.requires_grad or not trained)


def put(weights: Weights, model: Any) -> None:
    """Write weights into a model. Raises `AppError` for a part of one."""
    form = form_of(model)
    if any(form[name] != tuple(tensor.shape) for name, tensor in weights.items()):
        raise AppError(
            "the run's tasks are of sub-models, and a loop of one's own trains the whole model: "
            "set submodel.name = 'none' in the run's settings"
        )
    if not isinstance(model, dict):
        model.load_state_dict(weights)
        return
    for name, array in weights.items():
        if isinstance(model[name], np.ndarray):
            model[name][...] = array
        else:  # a script has put a list there
            model[name] = np.array(array)
