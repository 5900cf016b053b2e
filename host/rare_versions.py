"""A fleet that is small beside what it gathers says so at its first version.

Published defaults are of fleets of a hundred devices. With eight of them a buffer of ten came to 52 % on the
digits where one of two came to 86 (docs/strategies.md, "In a small fleet"), and nothing else would say why.
"""

from __future__ import annotations

from anabranch.core.effects import Published

FIRST = 1


def said_of(published: Published, devices: int) -> str:
    """What a version's user should know of it, where `devices` are enrolled; empty: nothing."""
    updates = len(published.update_ids)
    if published.version != FIRST or updates <= devices:
        return ""
    enrolled = "one device is" if devices == 1 else f"{devices} devices are"
    return (
        f"version {FIRST} took {updates} updates, and {enrolled} enrolled: if no more come, "
        "versions are rare, and a young model gains by moving often. Gather fewer (strategy.buffer_size): a "
        "quarter of a small fleet learned sooner"
    )
