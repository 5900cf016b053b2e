"""The numbers of `run.rules`: what the server of a run computes otherwise than that of an older release.

A log must lead to what it led to, so a run keeps the number that it was begun with. `NEWEST` is that of new
ones; whoever reads it asks for at least the first number that does so.

| from | what is computed                                                                                   |
|------|----------------------------------------------------------------------------------------------------|
| 0    | runs that say nothing of it, which older releases began                                            |
| 1    | a fraction of a count is what its decimals say (`core/shares.py`), of rounds, caches, caps, waves, |
|      | phases and the units that are left out                                                             |
|      | a version that a chain with `sr` encodes is rounded by 24 random bits a value, not by 8            |
|      | a message of the delta log whose levels would all be 0 has a finer unit                            |
|      | `port` asks for no direction since a base that is the newest version                               |
| 2    | in a private run the record of an update carries a salt (`core/privacy/mechanism.py`)              |
|      | masked sums are of no more updates than keepers take (`host/secagg.py`)                            |
|      | in a masked sum no update weighs less than a quarter of a fresh one, and the terms have the plan   |

One thing is under no number: with Adam at the server a sum or a mean whose square is no float32 stopped its
weight for good. A run of an older release that had one does not lead to what it led to.
"""

from __future__ import annotations

NEWEST = 2
