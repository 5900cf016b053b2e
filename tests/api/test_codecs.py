"""Codec chains as objects are their text: every stage has one, and each is the stage that it says."""

from __future__ import annotations

from inspect import isfunction

import numpy as np
import pytest

import anabranch as ab
from anabranch.api import codecs
from anabranch.api.codecs import CodecText
from anabranch.compress.broadcast import check_downlink
from anabranch.compress.chain import Chain
from anabranch.compress.feedback import Uplink
from anabranch.compress.registry import make_codec, stages
from anabranch.core.model.chains import FEEDBACK, RAW

CHAINS = [
    (codecs.topk(0.1) | codecs.int8() | codecs.gaps() | codecs.zstd(), "topk(0.1)|int8(256)|gaps|zstd"),
    (codecs.ef(0.5) | codecs.threshold(0.05, every=3) | codecs.bf16(), "ef(0.5)|threshold(0.05,3)|bf16"),
    (codecs.int4(256, stochastic=True) | codecs.zstd(7), "int4(256,sr)|zstd(7)"),
    (codecs.deadzone(step=0.001) | codecs.bitmap() | codecs.huffman(), "deadzone(step,0.001)|bitmap|huffman"),
    (codecs.mask(1e-05) | codecs.f32(), "mask(1e-05)|f32"),
    (codecs.topk(1 / 3) | codecs.u32(), f"topk({1 / 3!r})|u32"),
    (codecs.raw(), "raw"),
    (codecs.momentum(0.5) | codecs.int8(), "momentum(0.5)|int8(256)"),
    (codecs.topk(np.linspace(0.1, 0.2, 2)[0]) | codecs.int8(), "topk(0.1)|int8(256)"),
    ("topk(0.1)" | codecs.int8(), "topk(0.1)|int8(256)"),
]


@pytest.mark.parametrize(("chain", "text"), CHAINS)
def test_a_chain_is_its_text(chain: CodecText, text: str) -> None:
    assert chain == text
    Uplink(chain)
    config = ab.configure("synthetic", uplink=chain, until=ab.Until(updates=1))
    assert config.uplink.codec == text
    assert f'codec = "{text}"' in config.to_toml()


def test_a_dead_zone_is_by_a_fraction_or_by_a_step() -> None:
    with pytest.raises(ab.AnabranchError, match=r"deadzone\(0\.1, step=0\.2\): give the fraction"):
        codecs.deadzone(0.1, step=0.2)


def test_every_stage_has_a_function_and_is_what_it_is_called() -> None:
    functions = {
        name for name, found in vars(codecs).items() if isfunction(found) and not name.startswith("_")
    }
    assert functions == ({stage.partition(":")[0] for stage in stages()} | {FEEDBACK, RAW, "log"}) - {
        "logparts"
    }
    built = make_codec(codecs.deadzone(0.25) | codecs.gaps())
    assert isinstance(built, Chain)
    assert [stage.name for stage in built.stages] == ["deadzone", "gaps"]


def test_the_log_is_a_downlink() -> None:
    check_downlink(codecs.log(2.0))
    assert (
        ab.configure("synthetic", downlink=ab.codecs.log(), until=ab.Until(updates=1)).downlink.codec
        == "log(1)"
    )
    assert repr(ab.codecs.log()) == "CodecText('log(1)')"
