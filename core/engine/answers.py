"""What strategies, schedulers and rules answer, looked at before use: they may be somebody's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anabranch.core.engine.strategy import Plan, Refusal, Step
from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Decision, Verdict
from anabranch.core.parts import answer_text


def checked_refusal(found: Any, whose: str) -> Refusal | None:
    """Raises `AppError` for what `admit` must not answer."""
    if found is None or isinstance(found, Refusal):
        return found
    raise AppError(f"{whose}: admit must return None or a Refusal, not {_word(found)}")


def checked_plan(found: Any, whose: str, state_type: type[Any]) -> Plan:
    """Raises `AppError` for what `plan` must not answer."""
    if not isinstance(found, Plan):
        raise AppError(f"{whose}: plan must return a Plan, not {_word(found)}")
    if not isinstance(found.state, state_type):
        raise AppError(
            f"{whose}: plan must return its own state, a {state_type.__name__}, not {_word(found.state)}"
        )
    return found


def checked_decision(found: Any, whose: str) -> Step:
    """Raises `AppError` for what `step` must not answer, whatever its vector is."""
    if not isinstance(found, Step) or found.decision is None:
        raise AppError(f"{whose}: step must return a Step with a decision, not {_word(found)}")
    _check_decision(found.decision, found.vector is not None, f"{whose}: step")
    return found


def _check_decision(decision: Decision, is_version: bool, whose: str) -> None:
    """Raises `AppError` for one that is not what the step does, or that no journal and report can have."""
    verdict, staleness, weight = decision.verdict, decision.staleness, decision.weight
    if is_version is not (verdict is Verdict.PUBLISHED):
        if is_version:
            raise AppError(
                f"{whose} gives a vector, which is a new version, and says {str(verdict)!r}: "
                "say 'published', or give None for the vector"
            )
        raise AppError(f"{whose} says 'published' and gives no vector: give the new model, or say 'held'")
    if type(staleness) is not int or staleness < 0:
        raise AppError(
            f"{whose} decides with a staleness of {staleness!r}: give a whole number from 0 on, such as "
            "context.staleness"
        )
    if weight is not None and not (isinstance(weight, float | int) and math.isfinite(weight)):
        raise AppError(f"{whose} decides with a weight of {weight!r}: give a finite number, or None")


def checked_step(found: Any, whose: str, spec: ParamSpec) -> Step:
    """Raises `AppError` for what no step is: no device could read a version of another form."""
    step = checked_decision(found, whose)
    vector = step.vector
    if vector is None:
        return step
    wanted = f"a vector of {spec.size} values of {spec.vector_dtype.name}"
    if not isinstance(vector, np.ndarray):
        raise AppError(f"{whose}: step must give {wanted}, not {_word(vector)}")
    if vector.shape != (spec.size,) or vector.dtype != spec.vector_dtype:
        shown = f"an array of shape {vector.shape} and {vector.dtype.name}"
        raise AppError(f"{whose}: step must give {wanted}, as its argument is, not {shown}")
    if not vector.flags.writeable:
        raise AppError(
            f"{whose}: step must give {wanted} that can be written to, such as a copy by numpy.array: "
            "another library's is read-only, and so is its argument where may_publish has said 'no'"
        )
    return step


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
