"""`[limits]`: which caps may be what, who is told of them, and that one holds in a simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prices import Prices

from anabranch.core.config.caps import heard_by_device
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.settable import check_settable, differences
from anabranch.core.errors import ConfigError
from anabranch.core.limits import DEFAULT_LIMITS, KIB, MIB, Limits
from anabranch.core.model.params import ParamSpec
from anabranch.host.build import Blueprint, device_tables
from anabranch.simulation.run import simulate


def config(**limits: Any) -> Config:
    tables = {
        "run": {"updates_max": 12, "workload": "prices"},
        "fleet": {"clients": 4},
        "client": {"steps": 2, "batch_size": 10},
        "limits": limits,
    }
    return merge([("test", tables)])


def test_what_says_nothing_is_not_in_the_configuration() -> None:
    assert "limits" not in Config().to_json()
    assert config().limits == DEFAULT_LIMITS
    set_ = config(queue_events_max=7)
    assert Config.from_json(set_.to_json()) == set_
    assert set_.limits == Limits(queue_events_max=7)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"queue_events": 5}, "unknown key in .limits.: 'queue_events'; did you mean 'queue_events_max'"),
        ({"rpcs_max": 0}, "limits.rpcs_max must be greater than 0"),
        ({"rpcs_max": -1}, "limits.rpcs_max must not be negative"),
        ({"rpcs_max": 1.5}, "limits.rpcs_max must be int"),
        ({"chunk_bytes_max": 2**21}, "limits.chunk_bytes_max must be at most 1048576"),
        ({"message_bytes_max": 2**20, "chunk_bytes_max": MIB}, "message_bytes_max must be at least 1114112"),
        ({"message_bytes_max": 64 * KIB}, "limits.message_bytes_max must be at least 65537"),
        ({"message_bytes_max": 1}, "limits.message_bytes_max must be at least 65537"),
        ({"message_bytes_max": 0}, "limits.message_bytes_max must be greater than 0"),
        ({"id_chars_max": 65}, "limits.id_chars_max must be at most 64"),
        ({"id_chars_max": 16}, "limits.id_chars_max must be at least 32"),
    ],
)
def test_a_cap_that_cannot_be_is_an_error(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**limits)


def test_chunks_of_which_nothing_is_said_fit_into_messages_of_which_something_is() -> None:
    """As all of an older release did, whose chunks had 256 KiB by default."""
    assert config(message_bytes_max=2**20).limits == Limits(
        message_bytes_max=2**20, chunk_bytes_max=960 * KIB
    )
    assert config(message_bytes_max=320 * KIB).limits.chunk_bytes_max == 256 * KIB
    assert config(message_bytes_max=4 * MIB).limits.chunk_bytes_max == MIB
    kept = config(message_bytes_max=2**20)
    assert Config.from_json(kept.to_json()) == kept


def test_no_cap_changes_while_a_run_goes_on_and_receipts_not_at_a_restart() -> None:
    with pytest.raises(ConfigError, match=r"limits.rpcs_max cannot be changed in a run: it is of"):
        check_settable(["limits.rpcs_max"])
    assert list(differences(config(), config(rpcs_max=5))) == []
    assert list(differences(config(), config(receipts_max=5))) == [("limits.receipts_max", 100_000, 5)]


def test_devices_are_told_what_they_go_by() -> None:
    assert device_tables(config())["limits"] == {"quick_chunk_bytes_max": MIB}
    assert "limits" not in device_tables(config(chunk_bytes_max=256 * KIB, queue_events_max=7))
    told = device_tables(config(chunk_bytes_max=64 * KIB, queue_events_max=7))
    assert told["limits"] == {"chunk_bytes_max": 64 * KIB}
    assert heard_by_device(DEFAULT_LIMITS, told) == Limits(chunk_bytes_max=64 * KIB)
    assert heard_by_device(DEFAULT_LIMITS, device_tables(config())) == DEFAULT_LIMITS


def test_a_device_of_before_is_told_of_no_chunk_that_a_slow_link_takes_too_long_for() -> None:
    told = device_tables(config(chunk_bytes_max=512 * KIB))["limits"]
    assert told == {"quick_chunk_bytes_max": 512 * KIB}  # of which it knows nothing
    assert heard_by_device(DEFAULT_LIMITS, {"limits": told}) == Limits(chunk_bytes_max=512 * KIB)


def test_a_server_of_before_says_nothing_of_its_chunks_and_takes_no_larger_ones() -> None:
    assert heard_by_device(Limits(streams_max=3), {}) == Limits(streams_max=3, chunk_bytes_max=256 * KIB)


def test_a_device_keeps_smaller_caps_of_its_own_whatever_a_server_says() -> None:
    small = Limits(chunk_bytes_max=16 * KIB, payload_bytes_max=MIB, frozen_bytes_max=5 * MIB)
    assert heard_by_device(small, {}) == small
    assert heard_by_device(small, device_tables(config())) == small
    told = device_tables(config(payload_bytes_max=2 * MIB, frozen_bytes_max=4 * MIB, chunk_bytes_max=8 * KIB))
    heard = Limits(chunk_bytes_max=8 * KIB, payload_bytes_max=MIB, frozen_bytes_max=4 * MIB)
    assert heard_by_device(small, told) == heard


def test_a_server_may_raise_what_a_device_has_no_word_of_its_own_on() -> None:
    told = device_tables(config(payload_bytes_max=2**31))
    assert heard_by_device(DEFAULT_LIMITS, told) == Limits(payload_bytes_max=2**31)


def test_the_engine_has_the_configurations_caps() -> None:
    spec = ParamSpec.of({"w": np.zeros(3)})
    assert Blueprint.of(config(receipts_max=7), spec).settings.receipts_max == 7
    assert Blueprint.of(config(receipts_max=7), spec, Limits(receipts_max=9)).settings.receipts_max == 9


def test_a_cap_that_was_set_holds_in_a_simulation() -> None:
    free = simulate(config(), app=Prices())
    assert (free.updates_applied, free.updates_rejected) == (12, 0)
    held = simulate(config(examples_max=29), app=Prices())  # each device has 30
    assert held.updates_applied == 0
    assert held.rejections == {"invalid": held.updates_rejected}
    assert simulate(config(examples_max=30), app=Prices()).updates_applied == 12
