"""What a device gets, from whatever it holds and whatever it can decode."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from broadcasting import SPEC, WIDE, Run, motion, tensors

from anabranch.compress.broadcast import check_downlink, first_replica, is_exact, make_broadcast
from anabranch.compress.delta_log import DeltaLog
from anabranch.compress.direct import DirectDownlink
from anabranch.compress.downloads import LIST, SNAPSHOT, SUM, apply_download, base_of
from anabranch.compress.model import full_bytes
from anabranch.compress.registry import STAGES
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate, TooLarge, UnknownCodec
from anabranch.core.model.params import Vector, digest
from anabranch.core.snapshot import state_digest
from anabranch.strategies.registry import make_strategy

LENGTH = struct.Struct("<I")
CHAINS = ["int8", "topk(0.1)|int8|gaps|zstd", "bf16", "log"]


def bits(vector: Vector | None) -> bytes:
    assert vector is not None
    return vector.tobytes()


# --- the configuration -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("auto", None), ("raw", None), ("log", DeltaLog), ("log(0.5,9)", DeltaLog), ("int8", DirectDownlink)],
)
def test_the_configuration_names_the_downlink(codec: str, kind: type | None) -> None:
    check_downlink(codec)
    broadcast = make_broadcast(SPEC, make_strategy("fedbuff", {}), codec)
    assert broadcast is None if kind is None else isinstance(broadcast, kind)


def test_the_log_takes_its_arguments() -> None:
    log = make_broadcast(SPEC, make_strategy("fedasync", {}), "log(0.5,9)")
    assert isinstance(log, DeltaLog)
    assert (log.step, log.versions_max, log.keeps_replicas, log.places) == (0.5, 9, True, 10)
    log = make_broadcast(SPEC, make_strategy("fedbuff", {}), "log(1,128,6)")
    assert isinstance(log, DeltaLog)
    assert (log.step, log.versions_max, log.keeps_replicas, log.places) == (1, 128, False, 6)


@pytest.mark.parametrize("places", [4, 6, 10, 14])
def test_the_first_version_has_as_many_places_as_are_asked_for(places: int) -> None:
    """Those of large tensors, by numpy's rounding; small ones have ten at least. A device builds the same."""
    run, codec = Run(f"log(1,128,{places})"), f"log(1,128,{places})"
    replica, w = run.replica(0), run.start
    assert replica is not None
    for name, fewest in (("first", places), ("first_bias", max(places, 10))):
        at = SPEC.slices[name]
        large = [SPEC.slices[n] for n in SPEC.slices if n.endswith("bias") == name.endswith("bias")]
        unit = 2.0 ** (np.ceil(np.log2(max(np.abs(w[s]).max() for s in large))) - fewest)
        assert np.array_equal(replica[at], (np.rint(w[at].astype(np.float64) / unit) * unit).astype("f4"))
    assert bits(first_replica(SPEC, codec, w)) == bits(replica)
    held = run.fetch(None)
    run.publish(*motion(4))
    assert bits(run.fetch(held)[1]) == bits(run.fetch(None)[1]) == bits(run.replica(4))


def test_fewer_places_make_snapshots_shorter() -> None:
    sizes = [len(Run(f"log(1,128,{places})").download(None).data) for places in (10, 8, 6, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.75 * sizes[0]


@pytest.mark.parametrize(
    "codec",
    [
        "log(3)",
        "log(0)",
        "log(1,0)",
        "log(a)",
        "log(1,2,3)",
        "log(1,2,21)",
        "log(1,2,5,6)",
        "log|zstd",
        "blub",
    ],
)
def test_a_downlink_that_is_not_known_is_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match=r"^downlink\.codec"):
        check_downlink(codec)
    with pytest.raises((ConfigError, UnknownCodec)):
        make_broadcast(SPEC, make_strategy("fedbuff", {}), codec)


# --- without a broadcast ---------------------------------------------------------------------


def test_without_a_downlink_codec_the_model_travels_as_it_is() -> None:
    run = Run("raw")
    assert run.engine.broadcast is None
    run.publish(*motion(2))
    got = run.download(1)
    assert (got.codec, got.version, got.from_version) == ("raw", 2, None)
    assert len(got.data) == full_bytes(SPEC) == 4 * SPEC.size + 8
    vector, frozen = apply_download(SPEC, got.codec, got.data, None, None)
    assert bits(vector) == bits(run.engine.vector)
    assert frozen is not None
    assert frozen["steps"] == 12
    assert vector.flags.writeable
    assert run.downloads.offer(run.engine, 1, None) is None


def test_what_was_offered_stays_although_the_engine_goes_on() -> None:
    for codec in ("raw", *CHAINS):
        run = Run(codec)
        run.publish(*motion(2))
        make = run.downloads.offer(run.engine, 2, 1)
        exact = run.downloads.exact(run.engine)
        assert make is not None
        expected, model = make(), run.engine.vector.copy()
        run.publish(*motion(3, seed=1))
        assert make() == expected
        vector, _ = apply_download(SPEC, "raw", exact().data, None, None)
        assert bits(vector) == bits(model)


@pytest.mark.parametrize("codec", ["raw", *CHAINS])
def test_what_is_first_made_after_the_engine_went_on_is_of_its_own_version(codec: str) -> None:
    payloads = []
    for goes_on in (False, True):
        run = Run(codec)
        run.publish(*motion(2))
        make = run.downloads.offer(run.engine, 2, None)
        assert make is not None
        if goes_on:
            run.publish(*motion(1, seed=1))
        payloads.append(make().data)
    assert payloads[0] == payloads[1]


def test_a_loan_costs_no_copy_before_the_update_that_makes_the_next_version() -> None:
    run = Run("raw", buffer_size=10)
    loan, lent, model = run.engine.lend(), run.engine.vector, bits(run.engine.vector)
    for delta in motion(9):
        run.push(run.ask(), delta)
        assert run.engine.vector is lent, "nobody writes on it yet"
    run.push(run.ask(), *motion(1, seed=1))
    assert run.engine.version == 1
    assert run.engine.vector is not lent
    assert bits(loan.vector) == model != bits(run.engine.vector)


def test_the_newest_version_is_lent_and_copied_only_where_the_next_one_comes_too_soon() -> None:
    run = Run("raw")
    run.publish(*motion(1))
    kept = run.downloads.exact(run.engine)()  # the maker is gone, the payload is not
    model = bits(run.engine.vector)
    assert np.shares_memory(np.frombuffer(kept.body, np.uint8), run.engine.vector), "nothing is copied"
    run.publish(*motion(1, seed=1))
    assert kept.data[: len(model)] == model
    assert not np.shares_memory(np.frombuffer(kept.body, np.uint8), run.engine.vector)
    place, model = run.engine.vector, bits(run.engine.vector)
    del kept
    run.publish(*motion(1, seed=2))
    assert run.engine.vector is place, "nobody holds it: it is written on"
    assert bits(run.engine.vector) != model


def test_a_loan_of_the_same_version_is_held_by_each_of_its_holders() -> None:
    run = Run("raw")
    run.publish(*motion(1))
    first, second = run.engine.lend(), run.engine.lend()
    model = bits(first.vector)
    del first
    run.publish(*motion(1, seed=1))
    assert bits(second.vector) == model != bits(run.engine.vector)
    newer = run.engine.lend()
    del second  # of an older version: the newer one is still out
    run.publish(*motion(1, seed=2))
    assert newer.vector is not run.engine.vector


def test_a_base_of_the_history_is_offered() -> None:
    run = Run("raw", "fedasync")
    run.ask()
    start = run.engine.vector.copy()
    run.publish(*motion(2))
    make = run.downloads.offer(run.engine, 0, None)
    assert make is not None
    assert bits(apply_download(SPEC, "raw", make().data, None, None)[0]) == bits(start)


# --- with the log ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, WIDE])
def test_whatever_a_device_holds_it_ends_at_the_replica(spec: object) -> None:
    run = Run("log", spec=WIDE if spec is WIDE else SPEC)
    holds = [run.fetch(None)]
    for move in motion(12):
        run.publish(move)
        holds.append(run.fetch(holds[-1]))
    expected = bits(run.replica(12))
    for held in [None, *holds[:12]]:
        assert bits(run.fetch(held)[1]) == expected
        assert bits(run.fetch(held, codecs=())[1]) == expected


def test_the_cheapest_is_chosen() -> None:
    run = Run("log")
    run.publish(*motion(16))
    one, few, none = run.download(15), run.download(12), run.download(None)
    assert (one.codec, few.codec, none.codec) == (SUM, SUM, SNAPSHOT)
    assert (one.from_version, few.from_version, none.from_version) == (15, 12, None)
    assert len(one.data) < len(few.data) < len(none.data) < full_bytes(SPEC)
    assert run.download(99).codec == run.download(-1).codec == SNAPSHOT


def test_a_fine_move_after_a_coarse_one_comes_as_a_list() -> None:
    """A sum would have the fine unit for the coarse range."""
    run, rng = Run("log"), np.random.default_rng(0)
    run.publish(*[np.zeros(SPEC.size, np.float32)] * 12)
    held = run.fetch(None)
    for unit in (2.0**-4, 2.0**-14):
        run.publish(rng.choice([-unit, unit], SPEC.size).astype(np.float32))
    assert run.download(held[0]).codec == LIST
    assert bits(run.fetch(held)[1]) == bits(run.replica(14))


def test_a_version_that_is_gone_is_not_offered() -> None:
    run = Run("log(1,3)")
    run.publish(*motion(8))
    assert run.downloads.offer(run.engine, 4, None) is None
    assert run.downloads.offer(run.engine, 9, None) is None
    assert run.downloads.offer(run.engine, 5, None) is not None
    assert run.download(4).codec == SNAPSHOT
    assert base_of(run.engine, 8, 5) == 5
    assert base_of(run.engine, 8, 4) is None
    assert base_of(run.engine, 8, 8) is None


def test_a_kept_base_is_offered_as_it_is() -> None:
    run = Run("log(1,3)", "fedasync")
    held, task = run.fetch(None), run.ask()
    run.publish(*motion(8))
    make = run.downloads.offer(run.engine, task.base_version, None, STAGES)
    assert make is not None
    assert (make().version, make().codec) == (task.base_version, "raw")
    assert bits(apply_download(SPEC, "raw", make().data, None, None)[0]) == bits(held[1])


def test_an_older_version_is_offered_as_it_was() -> None:
    run = Run("log")
    run.publish(*motion(5))
    then = run.download(3)
    run.publish(*motion(5, scale=1e-5))
    for downloads in (run.downloads, type(run.downloads)(SPEC, run.frozen)):
        make = downloads.offer(run.engine, 5, 3)
        assert make is not None
        assert make() == then


def test_a_device_that_cannot_decode_the_log_gets_the_same_values() -> None:
    run = Run("log")
    run.publish(*motion(3))
    got = run.download(2, codecs=("raw:1", "zstd:1"))
    assert got.codec == "raw"
    assert bits(apply_download(SPEC, "raw", got.data, None, None)[0]) == bits(run.replica(3))
    assert run.download(2, codecs=STAGES).codec == SUM


def test_frozen_tensors_come_with_the_snapshot_only() -> None:
    run = Run("log")
    held = run.fetch(None)
    snapshot = run.download(None)
    _, frozen = apply_download(SPEC, snapshot.codec, snapshot.data, None, None)
    assert frozen is not None
    assert frozen["steps"] == tensors()["steps"]
    run.publish(*motion(1))
    got = run.download(0)
    assert apply_download(SPEC, got.codec, got.data, got.from_version, held)[1] is None


def test_threads_make_the_same_payloads_while_versions_go_on() -> None:
    run, alone = Run("log(1,8)"), Run("log(1,8)")
    with ThreadPoolExecutor(4) as pool:
        futures = []
        for move in motion(20):
            run.publish(move)
            version = run.engine.version
            for holds in (None, version - 1, version - 3, version - 9):
                make = run.downloads.offer(run.engine, version, holds)
                assert make is not None
                futures.append((version, holds, pool.submit(make)))
        made = {(version, holds): future.result() for version, holds, future in futures}
    for move in motion(20):
        alone.publish(move)
        version = alone.engine.version
        for holds in (None, version - 1, version - 3, version - 9):
            assert made[version, holds] == alone.download(holds)


# --- each version by itself ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync"])
@pytest.mark.parametrize("chain", ["int8(256,sr)", "topk(0.1)|int8|gaps|zstd", "bf16"])
def test_a_direct_download_is_what_the_engine_takes_for_the_base(strategy: str, chain: str) -> None:
    run = Run(chain, strategy)
    run.publish(*motion(3))
    task = run.ask()
    got = run.download(None)
    assert got.codec == chain
    vector, frozen = apply_download(SPEC, got.codec, got.data, None, None)
    assert digest(vector) == got.vector_sha256
    assert frozen is not None
    plain = run.download(None, codecs=())
    assert plain.codec == "raw"
    assert bits(apply_download(SPEC, "raw", plain.data, None, None)[0]) == bits(vector)
    run.publish(*motion(3, seed=4))
    if strategy == "fedasync":
        assert bits(run.replica(task.base_version)) == bits(vector)
        assert len(run.engine.broadcast_state.replicas) <= 3
        make = run.downloads.offer(run.engine, task.base_version, None)
        assert make is not None
        assert bits(apply_download(SPEC, "raw", make().data, None, None)[0]) == bits(vector)
    else:
        assert run.replica(task.base_version) is None
        assert run.downloads.offer(run.engine, task.base_version, None) is None


def test_random_rounding_of_a_version_is_the_same_for_everybody() -> None:
    run, again = Run("int8(256,sr)"), Run("int8(256,sr)")
    run.publish(*motion(2))
    again.publish(*motion(2))
    assert run.download(None) == run.download(1) == again.download(None)
    assert state_digest(run.engine) == state_digest(again.engine)


# --- bad payloads ----------------------------------------------------------------------------


def test_a_payload_that_leads_from_elsewhere_is_refused() -> None:
    run = Run("log")
    held = run.fetch(None)
    run.publish(*motion(2))
    got = run.download(0)
    for wrong in (None, (1, held[1]), (0, held[1][:-1])):
        with pytest.raises(InvalidUpdate):
            apply_download(SPEC, got.codec, got.data, 0, wrong)
    with pytest.raises(InvalidUpdate):
        apply_download(SPEC, got.codec, got.data, None, held)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        LENGTH.pack(0),
        LENGTH.pack(2**32 - 1),
        LENGTH.pack(1),
        LENGTH.pack(1) + LENGTH.pack(2**32 - 1),
        LENGTH.pack(1) + LENGTH.pack(0),
        LENGTH.pack(1) + LENGTH.pack(3) + b"abc",
    ],
)
def test_a_list_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises((InvalidUpdate, TooLarge)):
        apply_download(SPEC, LIST, data, 0, (0, np.zeros(SPEC.size, np.float32)))


def test_bytes_behind_a_list_are_refused() -> None:
    run = Run("log")
    held = run.fetch(None)
    run.publish(*motion(1))
    message = run.download(0).data
    good = LENGTH.pack(1) + LENGTH.pack(len(message)) + message
    assert bits(apply_download(SPEC, LIST, good, 0, held)[0]) == bits(run.replica(1))
    with pytest.raises(InvalidUpdate, match="after its end"):
        apply_download(SPEC, LIST, good + b"\x00", 0, held)


@pytest.mark.parametrize("codec", ["raw", *CHAINS])
def test_a_cut_or_a_longer_payload_is_refused(codec: str) -> None:
    run = Run(codec)
    held = run.fetch(None)
    before = bits(held[1])
    run.publish(*motion(1))
    for got in (run.download(None), run.download(0)):
        for data in (got.data[:-1], got.data[: len(got.data) // 2], got.data + b"\x00", b""):
            with pytest.raises(AnabranchError):
                apply_download(SPEC, got.codec, data, got.from_version, held)
    assert bits(held[1]) == before


def test_values_that_are_not_finite_and_codecs_that_are_not_known_are_refused() -> None:
    run = Run("raw")
    bad = bytearray(run.download(None).data)
    bad[:4] = np.float32(np.nan).tobytes()
    payload = bytes(bad)
    with pytest.raises(InvalidUpdate, match="finite"):
        apply_download(SPEC, "raw", payload, None, None)
    with pytest.raises(UnknownCodec):
        apply_download(SPEC, "blub", payload, None, None)


def test_versions_travel_as_they_are_where_all_of_them_do() -> None:
    assert is_exact(lambda _: "raw")
    assert not is_exact(lambda version: "log" if version == 0 else "raw")
    assert not is_exact(lambda version: "raw" if version == 0 else "log")


def test_a_direct_download_is_kept_for_those_who_train_from_it() -> None:
    """Over a restart of the server as from version to version."""
    downlink = DirectDownlink(SPEC, lambda _: "int8", keeps_replicas=True)
    state = downlink.init(SPEC.flatten(tensors()))
    for how in (downlink.publish, downlink.restart):
        assert sorted(how(state, 5, SPEC.flatten(tensors()), (0,)).replicas) == ["0", "5"]
        assert sorted(how(state, 5, SPEC.flatten(tensors()), ()).replicas) == ["5"]
