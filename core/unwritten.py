"""Dataclasses that nobody writes on, for what is made of every message.

Python's own `frozen=True` sets each field by a call, which made a tenth of a simulated task's time. Here the
type checker alone holds the code to it; hashes, equality and `replace` are the same. What is on record and
passes through code of others, as tasks, updates and a strategy's context do, is a frozen dataclass of
Python's own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False, eq: bool = True, **options: bool) -> Any:
        """As that of `dataclasses`; a frozen one has its hash, and can be written on."""
        if cls is None:
            return lambda of: dataclass(of, frozen=frozen, eq=eq, **options)
        hashed = frozen and eq and "__hash__" not in vars(cls)
        return dataclasses.dataclass(cls, eq=eq, unsafe_hash=hashed, **options)


__all__ = ["dataclass"]
