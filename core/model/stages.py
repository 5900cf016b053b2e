"""Stages: a model that grows block by block, and what of it each stage needs and trains.

| symbol | name             | meaning                                                                    |
|--------|------------------|----------------------------------------------------------------------------|
| S      |                  | stages                                                                     |
| E_s    | stage.blocks     | the tensors that come with stage s, and stay                               |
| G_s    | stage.head       | the tensors of stage s alone: from the last block to the output            |
| T_s    | growth.starts    | the version at which stage s begins; T_1 = 0                               |
| W      | warm_up_versions | versions at the beginning of a later stage that train what is new alone    |

    stage_of(v) = the largest s with T_s <= v
    needed at v:   E_1, ..., E_s and G_s
    trained at v:  the same; for T_s <= v < T_s + W of a stage after another, p:  E_p+1, ..., E_s and G_s

A stage that begins at the version at which the next one does is passed over: p is the last one that was not.
Every trained tensor of the model is in one E_s or G_s, so that a part of the model says which stage it is of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.core.errors import ConfigError


@dataclass(frozen=True)
class ModelStage:
    """What a stage adds to the model: names of tensors, or of modules, which stand for all of theirs."""

    blocks: tuple[str, ...]
    head: tuple[str, ...]

    def __init__(self, blocks: Any, head: Any) -> None:
        object.__setattr__(self, "blocks", _names(blocks))
        object.__setattr__(self, "head", _names(head))

    @property
    def names(self) -> tuple[str, ...]:
        """Of both."""
        return self.blocks + self.head

    def to_json(self) -> list[list[str]]:
        """[blocks, head]."""
        return [list(self.blocks), list(self.head)]

    @classmethod
    def from_json(cls, data: Any) -> ModelStage:
        """The inverse of `to_json`. Raises `ValueError`."""
        blocks, head = data
        return cls([str(name) for name in blocks], [str(name) for name in head])

    def resolved(self, tensors: Mapping[str, bool], number: int) -> ModelStage:
        """With the names of tensors alone; `tensors` has those of the model, and whether each is trained.

        Raises `ConfigError` for a name of which there is nothing, or that is frozen.
        """
        return ModelStage(*(_resolved(names, tensors, number) for names in (self.blocks, self.head)))


def _names(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _resolved(names: tuple[str, ...], tensors: Mapping[str, bool], number: int) -> list[str]:
    found: list[str] = []
    for name in names:
        inside = [tensor for tensor in tensors if tensor.startswith(f"{name}.")]
        trained = [tensor for tensor in inside if tensors[tensor]] or [name]
        if name not in tensors and not inside:
            raise ConfigError(
                f"stages: stage {number} names {name!r}: the model has no such tensor or module"
            )
        if not tensors.get(trained[0], False):
            raise ConfigError(f"stages: stage {number} names {name!r}, which is frozen: name what is trained")
        found += trained
    return found


def check_stages(
    stages: tuple[ModelStage, ...], trained: Mapping[str, object], buffers: tuple[str, ...]
) -> None:
    """Raises `ConfigError` unless every trained tensor is in one stage's blocks or in one's head.

    `trained`: by their names.
    """
    owner: dict[str, str] = {}
    if stages and buffers:
        raise ConfigError(
            f"stages: {buffers[0]!r} is a buffer, whose statistics would be those of another stage: "
            "use norms that keep none, such as GroupNorm"
        )
    for number, stage in enumerate(stages, 1):
        if not stage.blocks or not stage.head:
            raise ConfigError(f"stages: stage {number} needs blocks and a head, by which it alone is known")
        for what, names in (("blocks", stage.blocks), ("head", stage.head)):
            for name in names:
                place = f"the {what} of stage {number}"
                if name not in trained:
                    raise ConfigError(
                        f"stages: {place} have {name!r}, which is no trained tensor of the model"
                    )
                if name in owner:
                    raise ConfigError(f"stages: {name!r} is in {owner[name]} and in {place}: name it once")
                owner[name] = place
    if stages and (missing := [name for name in trained if name not in owner]):
        raise ConfigError(f"stages: {missing[0]!r} is in no stage: name it among its blocks or in its head")


@dataclass(frozen=True)
class Growth:
    """When a model grows: `starts[s - 1]` is the version at which stage s begins. See the module."""

    starts: tuple[int, ...]
    warm_up_versions: int = 0

    def stage_of(self, version: int) -> int:
        """The stage of a version, from 1."""
        return bisect_right(self.starts, version)

    def warms_up(self, version: int) -> bool:
        """Whether what is new is trained alone."""
        start = self.starts[self.stage_of(version) - 1]
        return start > 0 and version < start + self.warm_up_versions

    def before(self, version: int) -> int:
        """The stage before that of a version; 0 where the run began with that."""
        start = self.starts[self.stage_of(version) - 1]
        return self.stage_of(start - 1) if start > 0 else 0
