"""What a device's way to its server must do, whatever it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from anabranch.client.messages import NoticeKind, UploadState
from anabranch.client.transport import Transport
from anabranch.client.transports import ForeignTransport
from anabranch.compress.model import decode_model
from anabranch.compress.registry import make_codec
from anabranch.core.config.extras import how_to_install
from anabranch.core.content import BLAKE3, SHA256, usable
from anabranch.core.effects import Refused
from anabranch.core.errors import (
    IdTaken,
    InvalidUpdate,
    ManifestMismatch,
    Unavailable,
    UnknownTask,
    UnknownVersion,
)
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Reason, Task, Verdict
from anabranch.testing.federation import first_weights, result_of

SETTINGS = {"run": {"versions_max": 3}, "server": {"concurrency": 2}}
CALLS, CUTS = 50, 5  # of each of two threads; and after a cut
Connect = Callable[[str], Transport]


def enrolled(connect: Connect, client_id: str = "a") -> tuple[Transport, ParamSpec]:
    transport = connect(client_id)
    return transport, transport.enrol(Capability(examples=10)).spec


def granted(transport: Transport, spec: ParamSpec, task_id: str, client_id: str = "a") -> Task:
    answer = transport.ask(Ask(client_id, task_id), spec)
    assert isinstance(answer, Task)
    return answer


class TransportConformance:
    """Write the fixture `connect`: of a device's name, your transport to a new run.

    The run is of `config(**SETTINGS)` and `first_weights()` of `anabranch.testing.federation`, in a
    `anabranch.client.local.LocalServer` or a server of your own.
    """

    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError(
            "write the fixture `connect`: of a device's name, your transport to a new run"
        )

    @pytest.fixture
    def opened(self, connect: Connect) -> Connect:
        """As a device has it: what is no answer, or no error of a device's, is told with the method."""

        def opened(client_id: str) -> Transport:
            made = connect(client_id)
            foreign: Any = ForeignTransport(type(made).__name__, lambda: made)
            return cast("Transport", foreign)

        return opened

    def cut(self) -> bool:
        """Cut the connections that are open, as a network does, and say True; or leave it out."""
        return False

    def test_enrolment_tells_the_run(self, opened: Connect) -> None:
        seen = opened("a").enrol(Capability(examples=10))
        assert seen.spec == ParamSpec.of(first_weights())
        assert (seen.run, seen.version, seen.config["fleet"]["clients"]) == ("test", 0, 4)
        assert set(seen.config) - {"limits"} == {"run", "fleet", "client", "flower", "server"}
        assert seen.config["server"] == {"tasks_per_client": 1}, "the rest of that table is nobody's business"
        assert opened("a").enrol(Capability(examples=10)) == seen

    def test_a_repeated_ask_gets_the_same_task(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        assert granted(transport, spec, "t-1") == task
        assert (task.task_id, task.client_id, task.base_version, task.local.steps) == ("t-1", "a", 0, 3)
        assert task.lease_s == 60.0

    def test_a_refusal_has_its_reason_and_a_window(self, opened: Connect) -> None:
        for client_id in ("a", "b"):
            transport, spec = enrolled(opened, client_id)
            granted(transport, spec, f"t-{client_id}", client_id)
        transport, spec = enrolled(opened, "c")
        refused = transport.ask(Ask("c", "t-c"), spec)
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.AT_CAPACITY
        earliest_s, latest_s = refused.retry_after_s
        assert earliest_s == latest_s / 2, "as (0.01, 0.02) of the settings, and what is told after a while"
        assert 0.02 <= latest_s <= 60.0
        assert not refused.final
        assert "2 of 2" in refused.detail

    def test_who_is_not_enrolled_is_told_so(self, opened: Connect) -> None:
        transport = opened("stranger")
        refused = transport.ask(Ask("stranger", "t-1"), ParamSpec.of(first_weights()))
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.UNKNOWN_CLIENT

    def test_the_first_version_is_the_first_weights(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        fetched = transport.fetch(spec.layout_hash, 0)
        vector, _ = decode_model(make_codec(fetched.codec), spec, memoryview(fetched.data))
        assert np.array_equal(vector, spec.flatten(first_weights()))
        assert (fetched.version, fetched.modified, fetched.final) == (0, True, False)
        assert (
            hashlib.sha256(fetched.data).digest()
            == hashlib.sha256(transport.fetch(spec.layout_hash).data).digest()
        )

    def test_only_what_is_newer_travels(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        assert not transport.fetch(spec.layout_hash, newer_than=0).modified
        transport.push(result_of(granted(transport, spec, "t-1"), spec, "u-1"))
        newer = transport.fetch(spec.layout_hash, newer_than=0)
        assert (newer.modified, newer.version) == (True, 1)

    def test_an_update_is_answered_once_and_for_ever(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        entry = result_of(granted(transport, spec, "t-1"), spec, "u-1")
        assert transport.query_upload("u-1").answer is None
        first = transport.push(entry)
        assert (first.decision.verdict, first.version, first.duplicate) == (Verdict.PUBLISHED, 1, False)
        assert first.decision.weight == pytest.approx(0.6)
        again = transport.push(entry)
        assert (again.decision, again.version, again.duplicate) == (first.decision, 1, True)
        assert transport.query_upload("u-1").answer == again
        assert transport.fetch(spec.layout_hash).version == 1

    def test_another_update_of_the_same_id_is_refused(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        answer = transport.push(result_of(task, spec, "u-1"))
        with pytest.raises(IdTaken, match="with other bytes"):
            transport.push(result_of(task, spec, "u-1", value=2.0))
        assert transport.query_upload("u-1").answer == replace(answer, duplicate=True)
        assert transport.fetch(spec.layout_hash).version == 1

    def test_a_digest_that_is_not_offered_is_refused_unless_the_update_is_known(
        self, opened: Connect
    ) -> None:
        if not usable(BLAKE3):
            pytest.skip(f"{BLAKE3} is not installed: {how_to_install(BLAKE3)}")
        transport, spec = enrolled(opened)
        entry = result_of(granted(transport, spec, "t-1"), spec, "u-1", algorithm=BLAKE3)
        with pytest.raises(InvalidUpdate, match="named by blake3, which this run does not offer"):
            transport.push(entry)
        assert transport.query_upload("u-1").answer is None
        assert transport.push(replace(entry, algorithm=SHA256)).version == 1
        with pytest.raises(IdTaken, match="by its sha256 digest, which a resend repeats"):
            transport.push(entry)

    def test_the_next_task_starts_from_what_the_update_made(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        other, _ = enrolled(opened, "b")
        theirs = other.ask(Ask("b", "t-b"), spec)
        assert isinstance(theirs, Task)
        entry, ask = result_of(granted(transport, spec, "t-1"), spec, "u-1"), Ask("a", "t-2")
        first = transport.push_and_ask(entry, ask, spec)
        assert isinstance(first.next, Task)
        assert (first.next.task_id, first.next.base_version, first.version) == ("t-2", 1, 1)
        other.push(result_of(theirs, spec, "u-b"))
        again = transport.push_and_ask(entry, ask, spec)
        assert (again.next, again.duplicate, again.version) == (first.next, True, 1)
        assert transport.fetch(spec.layout_hash, 1).version == 1, "the lease holds the version"
        assert transport.push(result_of(first.next, spec, "u-2")).decision.staleness == 1

    def test_a_push_may_ask_for_nothing(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        assert transport.push(result_of(granted(transport, spec, "t-1"), spec, "u-1")).next is None

    def test_an_update_moves_the_model_by_its_delta(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        transport.push(result_of(granted(transport, spec, "t-1"), spec, "u-1", value=0.5))
        fetched = transport.fetch(spec.layout_hash, 1)
        vector, _ = decode_model(make_codec(fetched.codec), spec, memoryview(fetched.data))
        expected = spec.flatten(first_weights()) + np.float32(0.6 * 0.5)  # FedAsync's default mixing
        assert np.allclose(vector, expected, atol=1e-6)

    def test_an_update_without_a_task_is_refused(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        with pytest.raises(UnknownTask):
            enrolled(opened, "b")[0].push(result_of(task, spec, "u-1"))

    def test_values_that_are_not_finite_are_refused_for_good(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        with pytest.raises(InvalidUpdate, match="not finite"):
            transport.push(result_of(task, spec, "u-1", value=float("nan")))
        answer = transport.query_upload("u-1").answer
        assert answer is not None
        assert (answer.decision.verdict, answer.decision.reason) == (Verdict.REJECTED, Reason.INVALID)
        assert transport.fetch(spec.layout_hash).version == 0

    def test_a_payload_of_another_size_is_refused(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        with pytest.raises(InvalidUpdate, match="bytes"):
            transport.push(result_of(granted(transport, spec, "t-1"), spec, "u-1", payload=b"1234"))

    def test_another_model_is_refused_everywhere(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        other = ParamSpec.of({"w": np.zeros(3, np.float32)})
        with pytest.raises(ManifestMismatch):
            transport.ask(Ask("a", "t-2"), other)
        with pytest.raises(ManifestMismatch):
            transport.fetch(other.layout_hash)
        with pytest.raises(ManifestMismatch):
            transport.push(result_of(task, spec, "u-1", manifest_sha256=other.layout_hash))

    def test_a_version_that_never_was_is_unknown(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        with pytest.raises(UnknownVersion):
            transport.fetch(spec.layout_hash, 99)

    def test_a_heartbeat_renews_the_lease(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        answer = transport.heartbeat("t-1", 1.0)
        assert answer.notices == ()
        assert answer.expires_at > task.expires_at, "the server has not heard of the progress"
        assert answer.version == 0
        assert transport.heartbeat("t-1", 1.0).expires_at == answer.expires_at, "it has got no further since"

    @pytest.mark.parametrize("diverged", [False, True])
    def test_a_task_that_was_given_back_is_cancelled(self, opened: Connect, diverged: bool) -> None:
        transport, spec = enrolled(opened)
        granted(transport, spec, "t-1")
        transport.drop("t-1", "the test wants it so", diverged)
        (notice,) = transport.heartbeat("t-1", 1.0).notices
        assert (notice.kind, notice.task_id) == (NoticeKind.CANCEL, "t-1")

    def test_two_threads_may_call_at_a_time(self, opened: Connect) -> None:
        """Heartbeats have a thread of their own on a device, and so has what is sent in the background."""
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")

        def beside() -> None:
            for n in range(CALLS):
                assert transport.query_upload(f"u-{n}") == UploadState(0), "another call's answer"
                if n % 10 == 0:
                    assert transport.heartbeat(task.task_id, float(n)).version == 0

        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(beside)
            for _ in range(CALLS):
                assert transport.fetch(spec.layout_hash).version == 0
            other.result()

    def test_after_a_cut_there_is_another_connection(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        task = granted(transport, spec, "t-1")
        if not self.cut():
            return
        for _ in range(CUTS):
            with suppress(Unavailable):
                transport.heartbeat(task.task_id, 1.0)
                return
        pytest.fail(f"{CUTS} calls in a row have failed: after a failure a call opens another connection")

    def test_the_end_of_a_run_is_told_everywhere(self, opened: Connect) -> None:
        transport, spec = enrolled(opened)
        late, _ = enrolled(opened, "b")
        late_task = granted(late, spec, "t-late", "b")
        for n in (1, 2, 3):
            transport.push(result_of(granted(transport, spec, f"t-{n}"), spec, f"u-{n}"))
        refused = transport.ask(Ask("a", "t-4"), spec)
        assert isinstance(refused, Refused)
        assert refused.final
        last = transport.fetch(spec.layout_hash, newer_than=2)
        assert (last.version, last.final, last.modified) == (3, True, True)
        seen = transport.fetch(spec.layout_hash, newer_than=3)
        assert (seen.version, seen.final, seen.modified) == (3, True, False)
        assert late.heartbeat("t-late", 1.0).notices[0].kind is NoticeKind.FINISHED
        answer = late.push(result_of(late_task, spec, "u-late"))
        assert (answer.decision.verdict, answer.decision.reason) == (Verdict.REJECTED, Reason.RUN_FINISHED)
