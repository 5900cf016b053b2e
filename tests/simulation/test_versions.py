"""One copy of a version, while somebody holds it."""

from __future__ import annotations

import numpy as np
from machines import SPEC, Bench, vector

from anabranch.compress.registry import make_codec
from anabranch.simulation.versions import Versions


def test_a_version_is_shared_and_does_not_change_with_the_engine() -> None:
    bench = Bench("fedbuff", buffer_size=1)
    bench.enrol("a")
    versions = Versions(bench.engine, make_codec("raw"), SPEC.frozen({"w": np.zeros(4, np.float32)}))
    first = versions.current()
    assert versions.current() is first
    bench.work("a", "t1")
    second = versions.current()
    assert (first.version, second.version) == (0, 1)
    assert first.vector.tolist() == vector(0, 0, 0, 0).tolist()
    assert second.vector.tolist() == bench.engine.vector.tolist() == [1, 1, 1, 1]
    assert first.payload_bytes == 16
    assert versions.in_use() == [0, 1]
    del first
    assert versions.in_use() == [1]
