"""Processes of devices that measure together: none waits for one that has died."""

from __future__ import annotations

from operator import methodcaller

import pytest
from measuring import benchmark

Crew = benchmark("crew").Crew
comes = methodcaller("wait")  # called with the barrier; with anything before it, it fails


def test_all_meet_and_end() -> None:
    crew = Crew(comes, [(), ()])
    crew.meet()
    crew.end()


def test_nobody_waits_for_one_that_has_died() -> None:
    crew = Crew(comes, [(), (5,)])
    with pytest.raises(RuntimeError, match="a process of devices failed"):
        crew.meet()
