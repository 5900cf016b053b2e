"""What server optimisers go together with: each works across kills, rollbacks and a replay, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kept_state import SPEC, Life, Tables, config_of
from proving import in_slices

from anabranch.core.errors import ConfigError
from anabranch.host.build import Blueprint
from anabranch.server.verify import verify
from anabranch.testing.models import tensors

NESTEROV = {"name": "nesterov", "lr": 0.5, "momentum": 0.5}
ADAM = {"name": "adam", "lr": 0.05}
FREE = {"name": "schedule_free", "lr": 0.5, "momentum": 0.8}
EF = {"uplink": {"codec": "ef(0.9)|topk(0.5)|int8(256)|gaps|zstd"}}
LOG = {"downlink": {"codec": "log(1)"}}
CENTRED = {"robust": {"rule": "centred_clipping", "clip": 3.0}}


def strategy(name: str, **params: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, **params}}


def fragments(parts: int, pattern: str = "balanced") -> dict[str, Any]:
    return {"submodel": {"name": "fragments", "parts": parts, "pattern": pattern}}


WORKS: dict[str, Tables] = {
    "a buffer, error feedback, the delta log": {
        **strategy("fedbuff", buffer_size=3, outer=NESTEROV), **EF, **LOG,
    },
    "a buffer, Adam, a rule, a cut": {**strategy("fedbuff", buffer_size=4, outer=ADAM), **EF, **CENTRED},
    "a hidden state": strategy("qafel", buffer_size=3, outer=NESTEROV),
    "rounds of parts, Adam, the delta log": {
        **strategy("fedavg", clients_per_round=4, deadline_s=20.0, outer=ADAM),
        **LOG,
        "submodel": {"name": "heterofl"},
    },
    "parts of a buffer": {
        **strategy("fedbuff", buffer_size=4, outer=NESTEROV), "submodel": {"name": "heterofl"},
    },
    "tensors of a buffer, momentum, error feedback, the delta log": {
        **strategy("fedbuff", buffer_size=3, outer=ADAM), **fragments(3), **EF, **LOG,
    },
    "tensors of a buffer, a rule, a cut": {
        **strategy("fedbuff", buffer_size=4), **fragments(2), **CENTRED,
    },
    "tensors of a hidden state": {**strategy("qafel", buffer_size=3), **fragments(2, "strided")},
    "tensors, mixed in, few bits": {
        **strategy("fedasync"), **fragments(3, "sequential"), **LOG, "uplink": {"codec": "int4(256)|zstd"},
        "server": {"staleness_max": 3},
    },
    "tensors of a cache": {**strategy("teasq_drop"), **fragments(2)},
    "rounds of tensors, Nesterov": {
        **strategy("fedavg", clients_per_round=4, deadline_s=20.0, outer=NESTEROV), **fragments(2), **EF,
        "model": {"buffers": "latest"},
    },
    "rounds of parts, a rule": {
        **strategy("fedprox", clients_per_round=4, deadline_s=20.0, outer=NESTEROV),
        **CENTRED,
        "submodel": {"name": "fedrolex"},
    },
    "momentum that comes later": {
        **strategy("delayed_nesterov", buffer_size=3, c=0.25), **EF, **LOG, "robust": {"clip": 3.0},
    },
    "an adaptive server, error feedback, the delta log": {
        **strategy("fadas", buffer_size=3, server_lr=0.05), **EF, **LOG,
    },
    "an adaptive server, a rule, few bits": {
        **strategy("fadas", buffer_size=4, flush_s=20.0), **CENTRED, "uplink": {"codec": "int4(256)|zstd"},
    },
    "steps and chains by speed and link, the delta log": {
        **strategy("fedbuff", buffer_size=3, scheduler={"name": "fedluck", "steps_max": 8}), **LOG,
    },
    "steps by speed, parts, mixed in": {
        **strategy("fedasync", scheduler={"name": "equal_time", "task_s": 3.0}), **EF,
        "submodel": {"name": "heterofl"},
    },
    "groups by speed, few bits, a cut": {
        **strategy("fedcompass", steps_min=1), **LOG,
        "uplink": {"codec": "int4(256)|zstd"}, "robust": {"clip": 3.0},
    },
    "directions, parts, error feedback, the delta log": {
        **strategy("port", buffer_size=3, flush_s=20.0), **EF, **LOG, "submodel": {"name": "fedrolex"},
    },
    "directions, buffers that are differences, a cut": {
        **strategy("port", buffer_size=2), "model": {"buffers": "average"}, "robust": {"clip": 3.0},
    },
    "mixed by less and less, parts, few bits": {
        **strategy("fedasmu", floor=0.1), **LOG, "submodel": {"name": "heterofl"},
        "uplink": {"codec": "int4(256)|zstd"},
    },
    "a window, error feedback, the delta log": {
        **strategy("fedfa", window_size=3), **EF, **LOG, "robust": {"clip": 3.0},
    },
    "buffers that grow, a mean of steps, parts, error feedback, the delta log": {
        **strategy("annealed", buffer_size=2, growth=0.1, outer=FREE), **EF, **LOG,
        "submodel": {"name": "fedrolex"},
    },
    "waves, momentum, a rule, parts, error feedback, the delta log": {
        **strategy("waves", share=0.75, outer=NESTEROV), **EF, **LOG, **CENTRED,
        "submodel": {"name": "fedrolex"},
    },
    "a memory of all, error feedback, the delta log": {**strategy("ca2fl", buffer_size=3), **EF, **LOG},
    "a mean of all, few bits, a cut": {
        **strategy("ace"), **LOG, "uplink": {"codec": "int4(256)|zstd"}, "robust": {"clip": 3.0},
    },
    "a mean of what is not too old": {
        **strategy("aced", staleness_max=4), **EF, "model": {"buffers": "latest"},
    },
    "a memory that begins with a phase": strategy("phased", phases=[
        {"strategy": "fedbuff", "buffer_size": 2, "until_updates": 20},
        {"strategy": "aced", "staleness_max": 6},
    ]),
    "of another version's buffers": {
        **strategy("delayed_nesterov", buffer_size=4), "model": {"buffers": "latest"},
        "uplink": {"codec": "topk(0.5)|int4(256)|gaps|zstd"},
    },
}  # fmt: skip
REFUSED: dict[str, tuple[Tables, str]] = {
    "a mix of models": (strategy("fedasync", outer=NESTEROV), "'fedbuff' or 'fedavg'"),
    "a cache that weighs late": (strategy("teasq", outer=NESTEROV), "'fedbuff' or 'fedavg'"),
    "a rule without a buffer": (
        {**strategy("delayed_nesterov"), **CENTRED},
        "gathers no buffer that takes one",
    ),
    "units for devices that train on": (
        {**strategy("fedasync"), "client": {"push": "elastic"}, "submodel": {"name": "heterofl"}},
        "set submodel.name = 'none', or 'fragments'",
    ),
    "more parts than blocks": (
        {**strategy("fedbuff"), **fragments(9)},
        "submodel.parts is 9, but the model has 3 blocks",
    ),
    "tensors of a memory": ({**strategy("ca2fl"), **fragments(2)}, "'ca2fl' takes whole models only"),
    "tensors of a sum with noise": (
        {**strategy("fedbuff"), **fragments(2), "privacy": {"noise": 1.0, "clip": 1.0}},
        "submodel.name = 'fragments' has devices send other parts",
    ),
    "parts for a memory": (
        {**strategy("ca2fl"), "submodel": {"name": "heterofl"}},
        "'ca2fl' takes whole models only",
    ),
    "a rule for a memory": ({**strategy("aced"), **CENTRED}, "'aced' gathers no buffer that takes one"),
    "a memory that is too small": (
        {**strategy("ace", memory_bytes_max=9000), "fleet": {"clients": 9}},
        r"memory_bytes_max is 9000, but the updates of fleet\.clients = 9 devices",
    ),
    "parts for an adaptive server": (
        {**strategy("fadas"), "submodel": {"name": "fedrolex"}},
        "'fadas' takes whole models only",
    ),
    "one schedule for all phases": (
        strategy("phased", scheduler={"name": "capped"}),
        "each phase has a scheduler of its own",
    ),
    "parts for groups by speed": (
        {**strategy("fedcompass"), "submodel": {"name": "heterofl"}},
        "'fedcompass' takes whole models only",
    ),
    "parts for a window of models": (
        {**strategy("fedfa"), "submodel": {"name": "random"}},
        "'fedfa' takes whole models only",
    ),
    "a rule for groups by speed": (
        {**strategy("fedcompass"), **CENTRED},
        "'fedcompass' gathers no buffer that takes one",
    ),
    "what devices keep and send again": (
        {**strategy("delayed_nesterov"), "client": {"push": "elastic"}},
        "client.merge_weight = 1",
    ),
}


# What has the strategy, the planner and the optimiser of another, in other company.
WITH_PROVE = (
    "a buffer, error feedback, the delta log",
    "parts of a buffer",
    "tensors of a buffer, a rule, a cut",
    "tensors of a hidden state",
    "tensors of a cache",
    "rounds of tensors, Nesterov",
    "an adaptive server, a rule, few bits",
    "steps by speed, parts, mixed in",
    "directions, buffers that are differences, a cut",
    "of another version's buffers",
)
# Whose strategy is in another that stays, or differs from one of these by its devices alone (FedProx).
WITH_SLOW = (
    "a buffer, Adam, a rule, a cut",
    "tensors of a buffer, momentum, error feedback, the delta log",
    "rounds of parts, a rule",
    "a mean of what is not too old",
)


@pytest.mark.parametrize("name", in_slices(WORKS, WITH_PROVE, WITH_SLOW))
def test_it_is_the_same_after_a_kill_and_its_log_replays(name: str, tmp_path: Path) -> None:
    """Two operators' rollbacks on the way, where there can be any."""
    life = Life("", tmp_path, WORKS[name])
    for first, last in ((0, 45), (45, 80)):
        life.play(first, last)
        expected = life.expected
        life.close()
        life = Life("", tmp_path, WORKS[name])
        assert life.expected == expected
        life.books.save(life.now)  # the second time there is more of the log than of the snapshot
    life.close()
    assert expected["version"] > 5
    assert verify(tmp_path, whole=True).problems == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_fix(name: str) -> None:
    tables, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        Blueprint.of(config_of("", tables), SPEC).engine(tensors())
