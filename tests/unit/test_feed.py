"""What a server tells of a task."""

from __future__ import annotations

import asyncio

from anabranch.core.effects import CohortLost, Effect, Finished, Granted
from anabranch.core.model.submodels import Submodel, unit_map
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.server.feed import KEPT, Feed
from anabranch.testing.models import SPEC


def told_of(effect: Effect) -> dict[str, object]:
    """What a watch has of it."""

    async def newest(feed: Feed) -> dict[str, object]:
        async for happening in feed.follow(0):
            return {"kind": happening.kind, **happening.data}
        return {}

    feed = Feed()
    feed.hear(1, 2.0, [effect, Finished("the end")])  # so that there is one in any case
    return asyncio.run(newest(feed))


def told(submodel: Submodel | None) -> dict[str, object]:
    """Of a task of this part of the model."""
    task = Task("t-1", "a", 0, 1.0, 9.0, 8.0, 1, LocalPlan(), submodel=submodel)
    return told_of(Granted(task))


def test_a_task_of_a_part_says_which_share_of_the_model_that_is() -> None:
    part = unit_map(SPEC, [[0] for _ in SPEC.groups])
    assert told(part)["share"] == part.size / SPEC.size
    assert "share" not in told(None)


def test_a_watch_has_what_happened_before_the_end_however_slowly_it_reads() -> None:
    """The last measurement of a run is told to its trackers, which may still be starting."""

    async def read(feed: Feed) -> list[str]:
        found = []
        async for happening in feed.follow(-1):
            found.append(str(happening.data["why"]))
            if len(found) == 2:
                feed.hear(3, 4.0, [Finished("the third")])
                feed.close()
            await asyncio.sleep(0)
        return found

    feed = Feed()
    feed.hear(1, 2.0, [Finished("the first"), Finished("the second")])
    assert asyncio.run(read(feed)) == ["the first", "the second", "the third"]


def test_a_watch_goes_on_behind_its_cursor_or_from_now_and_misses_what_is_no_longer_kept() -> None:
    feed = Feed()

    def hear(first: int, last: int) -> None:
        for seq in range(first, last + 1):
            feed.hear(seq, 2.0, [Finished(f"event {seq}")])

    async def watch() -> None:
        slow = feed.follow(0)
        hear(1, KEPT + 3)
        assert (await anext(slow)).seq == 4, "the oldest that is kept"
        hear(KEPT + 4, 2 * KEPT + 8)
        assert [(await anext(slow)).seq for _ in range(2)] == [KEPT + 9, KEPT + 10]
        assert (await anext(feed.follow(2 * KEPT + 7))).seq == 2 * KEPT + 8
        coming = asyncio.ensure_future(anext(feed.follow(None)))
        await asyncio.sleep(0)
        assert not coming.done()
        hear(7, 7)
        assert (await coming).data == {"why": "event 7"}

    asyncio.run(watch())


def test_a_masked_sum_that_is_given_up_is_told() -> None:
    lost = CohortLost(7, ("u", "v"), "a keeper lies")
    assert told_of(lost) == {"kind": "cohort_lost", "cohort": 7, "updates": 2, "why": "a keeper lies"}
