"""The settings that were changed while the run went on: by whom, when, and what a file has said of them.

Three sides have a say, as with `kubectl apply`: what the files and flags of the server's start said when they
were last looked at (`read`), what they say now, and what is in force. Only what they say otherwise than the
last time is taken from them at a start, so what an operator has set in the meantime stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import SettingChange, SettingsSet
from anabranch.core.engine.settable import SETTABLE, in_force, value_in_force, value_of
from anabranch.core.engine.settings import EngineSettings


@dataclass(frozen=True)
class Changes:
    """Never changed in place. `made`: the newest of each setting; `read`: what a start has said last."""

    made: Mapping[str, SettingChange] = field(default_factory=dict)
    read: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.made)

    @property
    def values(self) -> dict[str, Any]:
        """What is in force of the settings that were changed."""
        return {path: change.value for path, change in self.made.items()}

    def take(
        self, event: ev.SettingsChanged, settings: EngineSettings
    ) -> tuple[Changes, EngineSettings, SettingsSet]:
        """The record after an event, which finds these settings in force, and what is in force then."""
        made = tuple(
            SettingChange(path, value, value_in_force(settings, path), event.by, event.now)
            for path, value in sorted(event.values.items())
        )
        read = {**self.read, **event.values} if event.at_start else self.read
        changes = Changes({**self.made, **{c.path: c for c in made}}, read)
        return changes, in_force(settings, event.values), SettingsSet(made)


@dataclass(frozen=True)
class StartSettings:
    """What the files and flags of a start say: `new` is to be taken from them.

    `passed_over`: they say otherwise than what is in force, and that stays: see the module.
    """

    new: Mapping[str, Any]
    passed_over: Mapping[str, Any]

    @classmethod
    def of(cls, stored: Config, given: Config, changes: Changes, read_at: float = math.inf) -> StartSettings:
        """Of a run that was started with `stored`. A word of before `read_at` is older than a later change.

        A setting that nobody names stays as it is.
        """
        new, passed_over, today = {}, {}, Config()
        for path in SETTABLE:
            value = value_of(given, path)
            if path not in given.sources and value == value_of(today, path):
                continue
            made = changes.made.get(path)
            before = changes.read.get(path, value_of(stored, path))
            if value != before and (made is None or made.at < read_at):
                new[path] = value
            elif value != (before if made is None else made.value):
                passed_over[path] = value
        return cls(new, passed_over)
