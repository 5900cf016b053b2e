"""What tests must leave as they found it is put back, and said."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from grpc import aio
from left import FREED, Standing, at_the_end, ended, loggers_put_back

OURS, OTHERS = logging.getLogger("anabranch.test_left"), logging.getLogger("library_of_test_left")


def test_what_was_set_of_a_logger_is_said_and_put_back() -> None:
    before = Standing.of(OURS)
    for name in ("", "anabranch.test_left", "anabranch.test_left.new"):
        root = Standing.of(logging.root)
        with loggers_put_back() as changed:
            logger = logging.getLogger(name)
            logger.setLevel(logging.CRITICAL)
            logger.addHandler(logging.StreamHandler())
            logger.addFilter(lambda _: False)
            logger.propagate = False
        assert [line.partition(":")[0] for line in changed] == [name or "root"]
        assert Standing.of(logging.root) == root
    assert Standing.of(OURS) == before
    assert Standing.of(logging.getLogger("anabranch.test_left.new")) == Standing()


def test_what_was_put_back_and_what_a_library_sets_up_is_not_said() -> None:
    with loggers_put_back() as changed:
        OURS.setLevel(logging.DEBUG)
        OURS.setLevel(logging.NOTSET)
        OTHERS.setLevel(logging.DEBUG)
        logging.getLogger("alembic.test_left").setLevel(logging.DEBUG)  # as at its import
        OURS.addHandler(logging.NullHandler())
    assert changed == []
    assert OTHERS.level == logging.DEBUG


def test_a_server_of_grpcs_that_was_not_stopped_is_heard_of_and_no_other() -> None:
    async def freed(stops: bool) -> None:
        server = aio.server()
        if stops:
            await server.start()
            await server.stop(None)

    for stops in (True, False):
        asyncio.run(freed(stops))
        gc.collect()
        assert bool(FREED.taken()) is not stops


def test_what_a_test_begins_is_ended_with_it_the_last_first() -> None:
    gone: list[str] = []

    def fail() -> None:
        with ended():
            at_the_end(lambda: gone.append("server"))
            at_the_end(lambda: gone.append("device"))
            raise ZeroDivisionError

    at_the_end(lambda: gone.append("of this test"))
    with pytest.raises(ZeroDivisionError):
        fail()
    assert gone == ["device", "server"]
