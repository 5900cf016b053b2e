"""Bytes that were written once decode to the same values for ever."""

from __future__ import annotations

import json

import codec_golden as golden
import numpy as np
import pytest
from codec_golden import FILES, FOLDER, LAYOUT

from anabranch.compress.registry import make_codec, stages
from anabranch.core.model.chains import parse_chain
from anabranch.core.model.params import SparseVector, dense, digest

X = golden.vector()
DIGESTS = json.loads(golden.DIGESTS.read_text(encoding="utf-8"))
# The length of the error of what is sent, relative to the length of it; biases are bf16 but with f32.
ERRORS = {"f32": 0.0, "bf16": 0.003, "int8": 0.06, "int4": 0.35, "e3m0": 0.25, "deadzone": 0.35}


@pytest.mark.parametrize("name", FILES)
def test_golden_bytes_decode(name: str) -> None:
    text = FILES[name]
    decoded = make_codec(text).decode((FOLDER / f"{name}.bin").read_bytes(), LAYOUT)
    assert digest(dense(decoded)) == DIGESTS[name]
    kind = next(stage.name for stage in parse_chain(text) if stage.name in ERRORS)
    where = decoded.indices if isinstance(decoded, SparseVector) else np.arange(X.size)
    error = (dense(decoded) - X)[where]
    assert np.linalg.norm(error) <= ERRORS[kind] * np.linalg.norm(X[where])


def test_a_golden_vector_is_of_its_formula() -> None:
    assert X[31 * 100] == np.float32(8 * ((31 * 100 * 2654435761 % 2**32) / 2**31 - 1) / 2 ** (8 + 6))
    assert digest(X) == DIGESTS["input"]


def test_every_stage_has_golden_bytes_and_every_file_is_tested() -> None:
    covered = {f"{stage.name}:1" for text in FILES.values() for stage in parse_chain(text)}
    assert set(stages()) - covered == {"raw:1", "ef:1", "momentum:1", "log:1", "logparts:1"}
    assert {file.stem for file in FOLDER.glob("*.bin")} == set(FILES)
