"""All that an App is asked and given, for tests of what stands for another one: nothing is forgotten."""

from __future__ import annotations

import inspect
from typing import Any

from anabranch.workloads.app import App

_PUBLIC = {name: found for name, found in vars(App).items() if not name.startswith("_")}
METHODS = {name: found for name, found in _PUBLIC.items() if inspect.isfunction(found)}
ATTRIBUTES = {*_PUBLIC} - {*METHODS}
GIVEN = {"options", "runtime", "version", "kept", "zeroth"}  # set from outside before it is asked


class Asked:
    """Methods that write down what they are asked, what they have been given by then, and answer that."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def method(self, name: str) -> Any:
        """One of them."""

        def answer(own: Any, *args: Any) -> Any:
            self.calls.append((name, args, {given: getattr(own, given) for given in sorted(GIVEN)}))
            return self.calls[-1]

        return answer


def arguments(name: str, **known: Any) -> tuple[Any, ...]:
    """For a method: what is known of its parameters, and an object for each other one."""
    return tuple(known.get(own, object()) for own in [*inspect.signature(METHODS[name]).parameters][1:])
