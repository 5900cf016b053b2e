"""One good update through the strategy: what it may weigh, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from anabranch.core.engine.answers import checked_step
from anabranch.core.engine.buffers import Buffers, ReachedBuffers
from anabranch.core.engine.clipping import clipped
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Context, State, Step, Strategy
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Update, Verdict


class StepView(Protocol):
    """What the engine has on record."""

    spec: ParamSpec
    strategy: Strategy
    settings: EngineSettings
    state: State
    buffers: Buffers
    guard: Guard


def stepped(update: Update, context: Context, books: StepView, vector: Vector) -> Step:
    """The strategy's step: buffers as differences, and a bounded length where lengths are bounded.

    `vector` is the strategy's to write on.
    """
    given = as_given(update, context, books, vector)
    found = books.strategy.step(books.state, vector, given.update, context)
    step = checked_step(found, f"strategy {books.strategy.name!r}", books.spec)
    if step.decision is None or step.decision.verdict is Verdict.REJECTED:
        return step
    books.buffers.count(given.reached)
    detail = given.detail
    books.guard.taken(update.client_id, given.length, bool(detail), books.settings)
    return replace(step, decision=replace(step.decision, detail=detail)) if detail else step


class Given(NamedTuple):
    """An update as a strategy gets it; its length, where lengths are bounded, and what was done to it."""

    update: Update
    reached: ReachedBuffers | None = None
    length: float | None = None
    detail: str = ""


def as_given(update: Update, context: Context, books: StepView, vector: Vector) -> Given:
    """Buffers as differences, and a bounded length where lengths are bounded."""
    reached = None
    if books.buffers:
        base = context.base if books.strategy.mixes_models else None
        update, reached = books.buffers.given(update, vector, base)
    clip = books.settings.clip
    if isinstance(clip, str):  # left to the strategy
        clip = books.strategy.clip
    if not clip:
        return Given(update, reached)
    cut = clipped(update, books.spec, books.guard.lengths, clip)
    return Given(cut.update, reached, cut.length, cut.detail)
