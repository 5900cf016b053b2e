"""One copy of a version, while somebody holds it, and the bytes that lead to it."""

from __future__ import annotations

import weakref

import numpy as np
from machines import SPEC, Bench, vector

from anabranch.simulation.versions import Versions


def test_a_version_is_shared_and_does_not_change_with_the_engine() -> None:
    bench = Bench("fedbuff", buffer_size=1)
    bench.enrol("a")
    versions = Versions(bench.engine, SPEC.frozen({"w": np.zeros(4, np.float32)}))
    first = versions.offer(None).model
    assert versions.offer(None).model is first
    bench.work("a", "t1")
    second = versions.offer(0).model
    assert (first.version, second.version) == (0, 1)
    assert first.vector.tolist() == vector(0, 0, 0, 0).tolist()
    assert second.vector.tolist() == bench.engine.vector.tolist() == [1, 1, 1, 1]
    assert versions.exact().vector.tolist() == [1, 1, 1, 1]
    gone = weakref.ref(first)
    del first
    assert gone() is None


def test_a_device_that_has_the_version_downloads_nothing() -> None:
    bench = Bench("fedbuff", buffer_size=1)
    versions = Versions(bench.engine, {})
    assert [versions.offer(holds).payload_bytes for holds in (None, 0)] == [16, 0]
