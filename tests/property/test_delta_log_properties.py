"""Whatever is published and whoever fetches when: devices have the replica to the bit."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from broadcasting import SPEC, Held, Run, motion
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to

from anabranch.compress import wire
from anabranch.compress.delta_log import DeltaLog, apply
from anabranch.compress.downloads import apply_download
from anabranch.compress.layout import Layout
from anabranch.core.errors import AnabranchError
from anabranch.core.model.params import ParamSpec, Vector

LAYOUT = Layout.of(SPEC)
TINY = ParamSpec.of({"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)})
DEVICES = 4

# A step of the world: the server moves by 10^x, or a device fetches.
STEPS = lists_up_to(
    40,
    st.one_of(
        st.tuples(st.just("move"), st.sampled_from([-30.0, -6.0, -4.0, -3.0, -3.0, -1.0, 0.5, 3.0])),
        st.tuples(st.sampled_from(["fetch", "fetch", "raw"]), st.integers(0, DEVICES - 1)),
        st.tuples(st.just("lose"), st.integers(0, DEVICES - 1)),
    ),
)
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
VECTORS = st.lists(FLOATS, min_size=TINY.size, max_size=TINY.size)


@settings(max_examples=60)
@given(STEPS, st.sampled_from(["log", "log(2,5)", "log(0.3,1)"]), st.sampled_from(["fedbuff", "fedasync"]))
def test_any_path_of_downloads_ends_at_the_replica(steps: Any, codec: str, strategy: str) -> None:
    run = Run(codec, strategy)
    helds: list[Held | None] = [None] * DEVICES
    moves = iter(motion(len(steps), scale=1.0))
    for what, which in steps:
        if what == "move":
            run.publish(next(moves) * np.float32(10.0**which))
        elif what == "lose":
            helds[which] = None
        else:
            held = helds[which]
            if held is None or held[0] < run.engine.version:
                helds[which] = run.fetch(held, () if what == "raw" else None)
        for held in helds:
            if held is not None and (p := run.replica(held[0])) is not None:
                assert p.tobytes() == held[1].tobytes()
    final = run.replica(run.engine.version)
    assert final is not None
    for held in helds:
        newest = run.fetch(held) if held is None or held[0] < run.engine.version else held
        assert newest[1].tobytes() == final.tobytes()


@settings(max_examples=80)
@given(st.lists(VECTORS, min_size=2, max_size=12), st.sampled_from([0.1, 1.0, 2.0]))
def test_any_models_stay_on_the_grid(models: list[list[float]], step: float) -> None:
    log, layout = DeltaLog(TINY, step, keeps_replicas=True), Layout.of(TINY)
    vectors: list[Vector] = [np.asarray(m, np.float32) for m in models]
    state = log.init(vectors[0])
    replicas = [state.replica]
    for version, w in enumerate(vectors[1:], start=1):
        state = log.publish(state, version, w, [0])
        replicas.append(state.replica)
        for b in range(state.first, version):
            assert (
                apply(replicas[b], log.squash(state, version, b), layout).tobytes() == replicas[-1].tobytes()
            )
            p = replicas[b]
            for entry in state.entries[b - state.first :]:
                p = apply(p, entry.data, layout)
            assert p.tobytes() == replicas[-1].tobytes()
        for v in (0, state.first, version):
            found = DeltaLog(TINY, step, keeps_replicas=True).replica(state, v)
            assert found is not None
            assert found.tobytes() == replicas[v].tobytes()
        zeros = np.zeros(TINY.size, np.float32)
        assert apply(zeros, log.snapshot(state, version), layout).tobytes() == replicas[-1].tobytes()


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.sampled_from(["logsum", "logsnapshot"]), st.integers(1, 6))
def test_a_mutated_message_is_refused_or_finite(random: Any, codec: str, changes: int) -> None:
    """Checksums are made good again, so that what is behind them is tried as well."""
    held, messages = HELD, MESSAGES
    bad = bytearray(random.choice(messages[codec]))
    body = 1 + wire.HEAD.size + wire.CRC.size
    for _ in range(changes):
        kind, at = random.randrange(3), random.randrange(1 + wire.HEAD.size, len(bad))
        if kind == 0:
            bad[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            bad[at : at + random.randrange(1, 9)] = random.randbytes(random.randrange(9))
        elif len(bad) > body + 40:
            bad[at : at + 4] = random.choice([b"\x00" * 4, b"\xff" * 4, b"\x00\x00\x00\x7f"])
    tail = 8 if codec == "logsnapshot" else 0
    wire.CRC.pack_into(bad, 1 + wire.HEAD.size, zlib.crc32(bytes(bad[body : len(bad) - tail])))
    before = held[1].tobytes()
    try:
        vector, _ = apply_download(SPEC, codec, bytes(bad), held[0], held)
    except AnabranchError:
        return
    finally:
        assert held[1].tobytes() == before
    assert np.isfinite(vector).all()
    assert vector.shape == (SPEC.size,)


def _messages() -> tuple[Held, dict[str, list[bytes]]]:
    run = Run("log")
    held = run.fetch(None)
    found: dict[str, list[bytes]] = {"logsum": [], "logsnapshot": []}
    for move in motion(6):
        run.publish(move)
        found["logsum"].append(run.download(0).data)
        found["logsnapshot"].append(run.download(None).data)
    sparse = np.zeros(SPEC.size, np.float32)
    sparse[::50] = 0.1
    run.publish(sparse)
    found["logsum"].append(run.download(run.engine.version - 1).data)
    return held, found


HELD, MESSAGES = _messages()
