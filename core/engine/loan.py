"""A model that is read while its engine goes on: lent, and copied only if an update comes meanwhile."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from anabranch.core.model.params import Vector


@dataclass(frozen=True, eq=False)
class Loan:
    """`vector` (size,) stays as it is as long as anybody holds this; a view of it alone does not hold it."""

    vector: Vector


class Loans:
    """What an engine has lent of its newest version. Made in its thread, ended in any."""

    def __init__(self) -> None:
        self._newest: weakref.ref[Loan] | None = None

    def __reduce__(self) -> tuple[type[Loans], tuple[()]]:
        """A copy of an engine has lent nothing: its vector is another."""
        return Loans, ()

    def lend(self, vector: Vector) -> Loan:
        """The loan of a vector that will be written on; the same one as long as it is held."""
        held = self._held()
        if held is None or held.vector is not vector:
            held = Loan(vector)
            self._newest = weakref.ref(held)
        return held

    def holds(self, vector: Vector) -> bool:
        """Whether somebody reads this vector, so that it must not be written on."""
        held = self._held()
        return held is not None and held.vector is vector

    def _held(self) -> Loan | None:
        return None if self._newest is None else self._newest()
