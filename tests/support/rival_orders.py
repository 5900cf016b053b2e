"""Two operators who set something at the same time: each is right alone, and both together are not."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from anabranch.client.operator import OperatorClient
from anabranch.core.errors import ConfigError

TRIES = 5
ORDERS = ({"server.retry_after_min_s": 1.5}, {"server.retry_after_max_s": 1.0})
BACK = {"server.retry_after_min_s": 0.5, "server.retry_after_max_s": 2.0}


def check_one_is_refused(one: OperatorClient, other: OperatorClient) -> None:
    """Whichever comes second."""
    for _ in range(TRIES):
        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(_taken, (one, other), ORDERS)) == [False, True]
        one.set_settings(BACK)


def _taken(client: OperatorClient, order: Mapping[str, float]) -> bool:
    try:
        client.set_settings(order)
    except ConfigError:
        return False
    return True
