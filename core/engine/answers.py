"""What strategies, planners, schedulers and rules answer, looked at before use: they may be one's own."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from anabranch.core.config.ranges import COUNT_MAX
from anabranch.core.engine.strategy import Plan, Refusal, Step
from anabranch.core.errors import AnabranchError, AppError, InvalidUpdate
from anabranch.core.model.chains import RAW, parse_chain
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import TensorSet, UnitMap, tensor_set, unit_map
from anabranch.core.model.updates import Decision, LocalPlan, Reason, Verdict
from anabranch.core.parts import answer_text

REASONS = f"give one of Reason, such as Reason.{Reason.NOT_SELECTED.name}"


def checked_state(found: Any, whose: str, state_type: type[Any]) -> Any:
    """Raises `AppError` for what is no state. `whose`: "strategy 'mine': on_lost"."""
    if isinstance(found, state_type):
        return found
    raise AppError(f"{whose} must return its own state, a {state_type.__name__}, not {_word(found)}")


def checked_refusal(found: Any, whose: str) -> Refusal | None:
    """Raises `AppError` for what `admit` must not answer."""
    if found is None:
        return None
    if not isinstance(found, Refusal):
        raise AppError(f"{whose}: admit must return None or a Refusal, not {_word(found)}")
    _check_reason(found.reason, found.detail, f"{whose}: admit refuses")
    return found


def checked_plan(found: Any, whose: str, state_type: type[Any]) -> Plan:
    """Raises `AppError` for what is no plan with the state of whom it is."""
    if not isinstance(found, Plan):
        raise AppError(f"{whose}: plan must return a Plan, not {_word(found)}")
    checked_state(found.state, f"{whose}: plan", state_type)
    return found


def checked_task(found: Any, whose: str, state_type: type[Any], configured: LocalPlan) -> Plan:
    """Raises `AppError` for a plan by which no device trains; `configured` is what the settings say."""
    plan = checked_plan(found, whose, state_type)
    if flaw := plan_flaw(plan, configured):
        raise AppError(f"{whose}: plan gives {flaw}")
    return plan


def checked_part(
    found: Any, whose: str, state_type: type[Any], spec: ParamSpec, of_tensors: bool
) -> tuple[Any, UnitMap | TensorSet | None]:
    """A planner's state and the part of a task. Raises `AppError` for what `plan` must not answer."""
    if not (isinstance(found, tuple) and len(found) == 2):
        raise AppError(f"{whose}: plan must return its state and a part of the model, not {_word(found)}")
    state, part = found
    checked_state(state, f"{whose}: plan", state_type)
    if part is None or _is_part_of(part, spec, TensorSet if of_tensors else UnitMap):
        return state, part
    made_by = "tensor_set" if of_tensors else "unit_map"
    hint = ", or say of_tensors = True" if isinstance(part, TensorSet) and not of_tensors else ""
    raise AppError(
        f"{whose}: plan must give a part that {made_by}(spec, ...) has made, or None for the whole model, "
        f"not {_word(part)}{hint}"
    )


def _is_part_of(part: Any, spec: ParamSpec, kind: type[Any]) -> bool:
    """Whether it is of this kind and model, and as its maker makes it: it may be written down by hand."""
    if not isinstance(part, kind):
        return False
    try:
        part.check(spec)
        if part.checked:  # as ours are: a task need not do it twice
            return True
        if isinstance(part, TensorSet):
            return tensor_set(spec, part.tensors).tensors == part.tensors
        units_are_tuples = all(type(units) is tuple for units in part.kept)  # arrays compare by element
        return units_are_tuples and unit_map(spec, part.kept).kept == part.kept
    except (InvalidUpdate, TypeError, ValueError):
        return False


def plan_flaw(plan: Plan, configured: LocalPlan) -> str:
    """Why no task can have this training or this way back, or no device learns by it; empty: it can."""
    local = plan.local
    if local is not configured and (flaw := _local_flaw(local)):
        return flaw
    return "" if plan.uplink == RAW else _uplink_flaw(plan.uplink)


def _uplink_flaw(uplink: Any) -> str:
    if not isinstance(uplink, str):
        return f"{answer_text(uplink)} for its uplink: give a codec, such as 'raw'"
    try:
        parse_chain(uplink)
    except AnabranchError as error:
        return f"an uplink that is none: {error}"
    return ""


def _local_flaw(local: Any) -> str:
    if not isinstance(local, LocalPlan):
        return f"{answer_text(local)} for its local training: give a LocalPlan"
    for name, least in (("epochs", 0), ("steps", 0), ("batch_size", 1)):
        count = getattr(local, name)
        if type(count) is not int or not least <= count <= COUNT_MAX:
            return f"{name} = {count!r}: give a whole number, an int from {least} to {COUNT_MAX}"
    if not (local.epochs or local.steps):
        return "neither epochs nor steps: a device would train nothing"
    for name in ("learning_rate", "momentum", "weight_decay", "proximal_mu"):
        rate = getattr(local, name)
        if not _is_finite(rate) or rate < 0:
            return f"{name} = {rate!r}: give a finite number, a float from 0 on"
    return ""


def _is_finite(number: Any) -> bool:
    """Whether it is one of Python's own numbers, as a log has them, and finite."""
    return isinstance(number, float | int) and math.isfinite(number)


def _check_reason(reason: Any, detail: Any, whose: str) -> None:
    if not (isinstance(reason, Reason) and reason):
        raise AppError(f"{whose} with the reason {reason!r}: {REASONS}")
    if not isinstance(detail, str):
        raise AppError(f"{whose} with {answer_text(detail)} for its detail: say why in a text")


def checked_decision(found: Any, whose: str) -> Step:
    """Raises `AppError` for what `step` must not answer, whatever its vector is."""
    if not isinstance(found, Step) or found.decision is None:
        raise AppError(f"{whose}: step must return a Step with a decision, not {_word(found)}")
    _check_decision(found.decision, found.vector is not None, f"{whose}: step")
    _check_heard(found.heard, f"{whose}: step")
    return found


def checked_tick(found: Any, whose: str, state_type: type[Any], spec: ParamSpec | None) -> Step | None:
    """Raises `AppError` for what `on_timer` must not answer."""
    if found is None:
        return None
    if not isinstance(found, Step):
        raise AppError(f"{whose}: on_timer must return None or a Step, not {_word(found)}")
    checked_state(found.state, f"{whose}: on_timer", state_type)
    _check_heard(found.heard, f"{whose}: on_timer")
    _check_vector(found.vector, f"{whose}: on_timer", spec)
    return found


def checked_timer(due: Any, whose: str) -> float:
    """Raises `AppError` for what is no time; None, of a strategy that wants none, is not asked about."""
    if isinstance(due, float | int) and not math.isnan(due):
        return due
    raise AppError(f"{whose}: timer must return None or a time in seconds, not {due!r}")


def _check_decision(decision: Decision, is_version: bool, whose: str) -> None:
    """Raises `AppError` for one that is not what the step does, or that no journal and report can have."""
    verdict, staleness, weight = decision.verdict, decision.staleness, decision.weight
    if not isinstance(verdict, Verdict):
        raise AppError(f"{whose} decides {verdict!r}: give one of Verdict, such as Verdict.HELD")
    if is_version is not (verdict is Verdict.PUBLISHED):
        if is_version:
            raise AppError(
                f"{whose} gives a vector, which is a new version, and says {str(verdict)!r}: "
                "say 'published', or give None for the vector"
            )
        raise AppError(f"{whose} says 'published' and gives no vector: give the new model, or say 'held'")
    if type(staleness) is not int or staleness < 0:
        raise AppError(
            f"{whose} decides with a staleness of {staleness!r}: give a whole number from 0 on, an int such "
            "as context.staleness"
        )
    if weight is not None and not _is_finite(weight):
        raise AppError(f"{whose} decides with a weight of {weight!r}: give a finite number, a float, or None")
    if verdict is Verdict.REJECTED:
        _check_reason(decision.reason, decision.detail, f"{whose} rejects")


def _check_heard(heard: Any, whose: str) -> None:
    if not (isinstance(heard, Collection) and all(map(_is_finite, heard))):
        raise AppError(f"{whose} gives {heard!r} for how much of each update was heard: give finite floats")


def checked_step(found: Any, whose: str, spec: ParamSpec | None) -> Step:
    """Raises `AppError` for what `step` must not answer, its vector too where `spec` says of which model."""
    step = checked_decision(found, whose)
    _check_vector(step.vector, f"{whose}: step", spec)
    return step


def _check_vector(vector: Any, whose: str, spec: ParamSpec | None) -> None:
    """Raises `AppError` for a version that no device could read."""
    if vector is None or spec is None:
        return
    wanted = f"a vector of {spec.size} values of {spec.vector_dtype.name}"
    if not isinstance(vector, np.ndarray):
        raise AppError(f"{whose} must give {wanted}, not {_word(vector)}")
    if vector.shape != (spec.size,) or vector.dtype != spec.vector_dtype:
        shown = f"an array of shape {vector.shape} and {vector.dtype.name}"
        raise AppError(f"{whose} must give {wanted}, as its argument is, not {shown}")
    if not vector.flags.writeable:
        raise AppError(
            f"{whose} must give {wanted} that can be written to, such as a copy by numpy.array: "
            "another library's is read-only, and so is its argument where may_publish has said 'no'"
        )


def checked_vector(found: Any, whose: str, size: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Raises `AppError` for what is no array (size,) of numbers. `whose`: "robust rule 'mine': combine"."""
    wanted = f"{whose} must give an array of {size} numbers"
    if not isinstance(found, np.ndarray):
        raise AppError(f"{wanted}, not {_word(found)}")
    if found.shape != (size,) or found.dtype.kind not in "fiu":
        raise AppError(f"{wanted}, not one of shape {found.shape} and {found.dtype.name}")
    return found


def _word(found: Any) -> str:
    return "one without" if isinstance(found, Step) else answer_text(found)
