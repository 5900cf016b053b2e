"""`[secagg]`: the terms that follow of a configuration, and what masked sums do not go with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from machines import SPEC
from masked_bench import masked_config

from anabranch.core.config.tables import ClientTable, Config, merge
from anabranch.core.engine.settable import differences, typed, why_kept
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rules import NEWEST
from anabranch.core.secagg.plans import plan_digest
from anabranch.core.secagg.terms import Terms
from anabranch.host.build import Blueprint
from anabranch.host.secagg import check_guarded, terms_of
from anabranch.strategies.registry import strategy_of

FEW_FIT: dict[str, Any] = {"bits": 16, "value_bits": 9, "levels": 8}
PRIVATE: dict[str, Any] = {
    "privacy": {"clip": 0.5, "noise": 2.0, "participations": 3, "bands": 1},
    "fleet": {"clients": 9},
}


def terms(config: Config, spec: ParamSpec = SPEC) -> Terms:
    """Those of a run's blueprint."""
    made = Blueprint.of(config, spec, masks=True)
    assert made.sums() is None
    cohorts = made.cohorts()
    assert cohorts is not None
    return cohorts.terms


def test_the_terms_are_those_of_table_strategy_and_model() -> None:
    strategy = {"name": "fedbuff", "buffer_size": 10, "staleness": {"name": "hinge", "a": 1.0, "b": 1.0}}
    secagg = {"keepers": ["south", "north"], "bits": 16, "value_bits": 9, "levels": 4, "cohort_min": 9}
    assert terms(masked_config(strategy, secagg)) == Terms(
        bits=16,
        value_bits=9,
        clip=2.0,
        size=4,
        weights=(4, 4, 2, 1),
        cohort=10,
        cohort_min=9,
        keepers=("north", "south"),
        plan=plan_digest(LocalPlan(), ClientTable(), "average", SPEC.layout_hash),
    )


def test_the_default_weights_are_those_of_the_specification() -> None:
    weights = terms(masked_config(run={"rules": 1})).weights
    assert weights[:12] == (16, 11, 9, 8, 7, 7, 6, 6, 5, 5, 5, 5)
    assert (weights[-2:], len(weights)) == ((2, 1), 114), "16 / sqrt(tau + 1) is under 1.5 from 113 on"


def test_no_update_weighs_less_than_a_quarter_of_a_fresh_one() -> None:
    assert terms(masked_config()).weights == (16, 11, 9, 8, 7, 7, 6, 6, 5, 5, 5, 5, 4)
    steep = {"name": "fedbuff", "buffer_size": 2, "staleness": {"name": "polynomial", "a": 16.0}}
    assert terms(masked_config(steep, {"levels": 65536, "value_bits": 12})).weights == (65536, 16384)


def test_a_run_of_an_older_release_has_the_terms_that_it_had() -> None:
    """The digest is that of its keepers, and of the boxes that its devices have sealed."""
    strategy = {"name": "fedbuff", "buffer_size": 2, "staleness": {"name": "hinge", "a": 1.0, "b": 1.0}}
    for rules in (0, 1):
        found = terms(masked_config(strategy, {"levels": 5}, run={"rules": rules}))
        text = (
            '{"bits":32,"clip":2.0,"cohort":2,"cohort_min":2,"keepers":["north"],"noise":0.0,'
            '"participations":0,"separation":0,"size":4,"value_bits":20,"weights":[5,5,3,2,1]}'
        )
        assert found.digest == hashlib.sha256(text.encode()).hexdigest()
        assert Terms.from_json(json.loads(text)) == found


def test_the_plan_in_the_terms_is_that_of_the_configuration() -> None:
    plans = {
        terms(masked_config(**tables)).plan
        for tables in (
            {},
            {"client": {"learning_rate": 0.1}},
            {"client": {"epochs": 2}},
            {"client": {"gradient": "zeroth"}},
            {"model": {"buffers": "local"}},
        )
    }
    assert len(plans) == 5
    other: dict[str, Any] = {
        "client": {"retry_base_s": 9.0, "push": "overlap"},
        "server": {"tasks_per_client": 2},
    }
    assert terms(masked_config(**other)) == terms(masked_config())


def test_a_private_runs_noise_is_the_keepers_and_its_clip_holds() -> None:
    config = masked_config(secagg={"clip": 0.0}, **PRIVATE)
    found = terms(config)
    assert (found.clip, found.noise, found.participations, found.separation) == (0.5, 2.0, 3, 1)
    assert masked_config(secagg={"clip": 0.5}, **PRIVATE)
    promise = config.privacy.promise(1)
    assert promise is not None
    assert promise.mechanism == "gaussian"


@pytest.mark.parametrize(("keepers", "most"), [(1, 10_000), (14, 10_000), (15, 9787), (100, 1968)])
def test_no_run_has_sums_that_no_keeper_takes(keepers: int, most: int) -> None:
    """Live its first would wait for ever; an older simulation replays."""
    names = {"keepers": [f"k{i}" for i in range(keepers)], "value_bits": 12}

    def of(size: int, rules: int = NEWEST) -> Config:
        return masked_config({"name": "fedbuff", "buffer_size": size}, names, run={"rules": rules})

    assert terms(of(most)).cohort == most
    with pytest.raises(ConfigError, match=rf"buffer_size is {most + 1}, and .* sums of {most} updates at"):
        terms(of(most + 1))
    assert terms(of(most + 1, rules=1)).cohort == most + 1


def test_an_update_has_boxes_for_so_many_keepers() -> None:
    names = [f"k{i}" for i in range(131)]
    assert terms(masked_config(secagg={"keepers": names[:130]}))
    with pytest.raises(ConfigError, match=r"secagg\.keepers names 131: .* for 130 at most"):
        terms(masked_config(secagg={"keepers": names}))


def test_devices_send_numbers_once_in_a_sum_whatever_the_tables_leave_open() -> None:
    settings = EngineSettings.of(masked_config(secagg=FEW_FIT))
    assert (settings.uplink, settings.buffer_max, settings.clip) == ("ring(16,9)", 1, 0.0)
    assert settings.cohorts_waiting_max == 8
    # Nor does it hurt to say so.
    assert terms(masked_config(secagg=FEW_FIT, robust={"clip": 0, "buffer_max": 1}))
    plain = EngineSettings.of(merge([]))
    assert (plain.uplink, plain.buffer_max, plain.cohorts_waiting_max) == ("auto", 0, 0)


@pytest.mark.parametrize("name", ["fedbuff", "qafel"])
def test_strategies_of_buffers_can_have_masked_sums(name: str) -> None:
    assert terms(masked_config({"name": name, "buffer_size": 3})).cohort == 3


def test_of_a_scheduler_a_simulated_device_is_told_the_reason() -> None:
    """It asks for the terms before there is a blueprint; the strategy beneath is one that could."""
    config = masked_config({"name": "fedbuff", "buffer_size": 2, "scheduler": {"name": "equal_time"}})
    with pytest.raises(ConfigError, match=r"scheduler 'equal_time' with .*leave the scheduler out"):
        terms_of(config, SPEC, strategy_of(config))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fedasync": ({"strategy": {"name": "fedasync"}}, "'fedasync' cannot have masked sums.*'fedbuff'"),
    "asyncdrop": ({"strategy": {"name": "asyncdrop"}}, "'asyncdrop' cannot have masked sums.*'fedbuff'"),
    "rounds": ({"strategy": {"name": "fedavg"}}, "'fedavg' cannot have masked sums"),
    "phased": ({"strategy": {"name": "phased"}}, "'phased' cannot have masked sums"),
    "few": ({"secagg": {"cohort_min": 3}}, r"cohort_min is 3 and a buffer has 2.*buffer_size"),
    "one": (
        {"strategy": {"name": "fedbuff", "buffer_size": 1}, "secagg": {"cohort_min": 1}},
        "a sum of at least 2 hides one",
    ),
    "flush": (
        {"strategy": {"name": "fedbuff", "buffer_size": 2, "flush_s": 9.0}},
        r"strategy\.flush_s = 9\.0",
    ),
    "rule": ({"robust": {"rule": "median"}}, "robust.rule = 'median' looks at single updates"),
    "clip": ({"robust": {"clip": 3.0}}, r"robust\.clip = 3\.0 looks at the lengths"),
    "buffer_max": ({"robust": {"buffer_max": 2}}, "robust.buffer_max is 2.*once in a masked sum"),
    "few values": (
        {"uplink": {"codec": "topk(0.1)"}},
        r"uplink\.codec = 'topk\(0\.1\)' sends what does not add",
    ),
    "eight bits": ({"uplink": {"codec": "int8(256)|zstd"}}, r"updates travel as ring\(32,20\)"),
    "error feedback": ({"uplink": {"codec": "ef(1.0)|topk(0.1)"}}, r"uplink\.codec = 'ef"),
    "another ring": ({"uplink": {"codec": "ring(16,9)"}}, r"updates travel as ring\(32,20\)"),
    "units": ({"submodel": {"name": "heterofl"}}, "submodel.name = 'heterofl' has devices send parts"),
    "fragments": ({"submodel": {"name": "fragments"}}, "submodel.name = 'fragments' has devices send parts"),
    "elastic": ({"client": {"push": "elastic"}}, "client.push = 'elastic'"),
    "bits": ({"secagg": {"bits": 24}}, "secagg.bits must be 32 or 16, not 24"),
    "value bits": ({"secagg": {"value_bits": 40}}, "secagg.value_bits must be from 2 to secagg.bits, 32"),
    "overflow": ({"secagg": {"value_bits": 28}}, "need 33 bits, and secagg.bits is 32"),
    "bands": (
        {**PRIVATE, "privacy": {"clip": 2.0, "noise": 1.0, "separation": 2, "bands": 2}},
        "privacy.bands is 2: a keeper's noise is independent",
    ),
    "bands of the separation": (
        {**PRIVATE, "privacy": {"clip": 2.0, "noise": 1.0, "separation": 3}},
        "privacy.bands is 3.*set privacy.bands = 1",
    ),
    "few devices": ({**PRIVATE, "fleet": {"clients": 1}, "secagg": {"clip": 0.0}}, "need 2 devices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_masked_sums_do_not_go_with_is_refused_with_the_reason(name: str) -> None:
    tables, words = REFUSED[name]
    apart = ("strategy", "secagg")
    more = {table: keys for table, keys in tables.items() if table not in apart}
    config = masked_config(tables.get("strategy"), tables.get("secagg"), **more)
    with pytest.raises(ConfigError, match=words):
        Blueprint.of(config, SPEC, masks=True)


def test_the_ring_itself_may_be_said() -> None:
    assert terms(masked_config(uplink={"codec": "ring(32,20)"}))


def test_a_models_buffers_must_stay_on_the_devices() -> None:
    spec = ParamSpec.of({"w": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32)}, (), ["mean"])
    with pytest.raises(ConfigError, match=r"model\.buffers = 'average' needs what each device has measured"):
        terms(masked_config(), spec)
    assert terms(masked_config(model={"buffers": "local"}), spec).size == 5


def test_where_nothing_masks_there_are_no_masked_sums() -> None:
    with pytest.raises(ConfigError, match=r"secagg\.mode = 'keeper' is not served here"):
        Blueprint.of(masked_config(), SPEC)


def test_devices_without_certificates_have_no_masked_sums() -> None:
    with pytest.raises(ConfigError, match=r"needs devices with certificates.*identity\.tls = 'always'"):
        check_guarded(masked_config(), guarded=False)
    check_guarded(masked_config(), guarded=True)
    check_guarded(merge([]), guarded=False)


ON = {"mode": "keeper", "keepers": ["north"], "clip": 1.0}
BAD = {
    "mode": ({**ON, "mode": "cohort"}, "secagg.mode must be one of off, keeper, not 'cohort'"),
    "nobody": ({**ON, "keepers": []}, "secagg.keepers names none"),
    "no name": ({**ON, "keepers": [""]}, "secagg.keepers has an empty name"),
    "twice": ({**ON, "keepers": ["north", "north"]}, "names a keeper twice"),
    "no clip": ({**ON, "clip": 0.0}, "secagg.clip is not set"),
    "negative": ({**ON, "clip": -1.0}, "secagg.clip must not be negative"),
    "levels": ({**ON, "levels": 0}, "secagg.levels must be at least 1"),
    "waiting": ({**ON, "cohorts_waiting_max": 0}, "secagg.cohorts_waiting_max must be at least 1"),
    "off with keepers": ({"keepers": ["north"]}, "secagg.keepers is set and secagg.mode is 'off'"),
    "off with a clip": ({"clip": 1.0}, "secagg.clip is set and secagg.mode is 'off'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_masks_nothing_is_refused(name: str) -> None:
    table, words = BAD[name]
    with pytest.raises(ConfigError, match=words):
        merge([("test", {"secagg": table})])


def test_one_clip_holds() -> None:
    with pytest.raises(ConfigError, match=r"secagg\.clip is 2\.0 and privacy\.clip 0\.5"):
        masked_config(**PRIVATE)


@pytest.mark.parametrize("key", ["clip", "buffer_max"])
def test_no_operator_changes_what_a_sum_is_made_of(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"robust\.{key} cannot be changed in a run with masked sums"):
        typed(masked_config(), {f"robust.{key}": 0})
    with pytest.raises(ConfigError, match=r"secagg\.levels cannot be changed in a run: masks are sealed"):
        typed(masked_config(), {"secagg.levels": 8})


PLANNED: dict[str, Any] = {
    "epochs": 2,
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.5,
    "weight_decay": 0.5,
}


@pytest.mark.parametrize("key", PLANNED)
def test_no_operator_changes_the_plan_under_which_masks_are_sealed(key: str) -> None:
    values = {f"client.{key}": PLANNED[key]}
    with pytest.raises(ConfigError, match=rf"client\.{key} cannot be changed in a run with masked sums"):
        typed(masked_config(), values)
    assert typed(masked_config(run={"rules": 1}), values) == values
    assert typed(merge([]), values) == values
    assert typed(masked_config(), {"server.concurrency": 9}) == {"server.concurrency": 9}


def test_a_restart_may_not_say_another_way_to_train() -> None:
    tables = {"gradient": "zeroth", "gradient_eps": 0.1, "gradient_max": 2.0, "gradient_queries": 3}
    before = [("client.gradient", "exact"), ("client.gradient_eps", 0.001)]
    before += [("client.gradient_max", 0.0), ("client.gradient_queries", 1)]
    found = list(differences(masked_config(), masked_config(client=tables)))
    assert [(path, was) for path, was, _ in found] == before
    assert all("masks are sealed" in why_kept(path) for path, _, _ in found)
    older = {"run": {"rules": 1}}
    assert not list(differences(masked_config(**older), masked_config(**older, client=tables)))
    assert not list(differences(merge([]), merge([("test", {"client": tables})])))


def test_a_restart_may_not_say_other_terms() -> None:
    was, now = masked_config(), masked_config(secagg={"levels": 8})
    assert list(differences(was, now)) == [("secagg.levels", 16, 8)]


def test_a_run_without_masks_says_nothing_of_them() -> None:
    assert "secagg" not in merge([]).to_json()
    assert Blueprint.of(merge([]), SPEC, masks=True).cohorts() is None
