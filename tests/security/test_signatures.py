"""Updates are signed by their devices: checked before they are logged, and again by `verify`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from commands import anabranch
from guarded import Federation, SigningDevice, issued, record_of
from hypothesis import given
from hypothesis import strategies as st
from wire import chunks, requests

from anabranch.client.outbox import UpdateEntry
from anabranch.core.errors import InvalidSignature
from anabranch.core.model.updates import Ask, Capability, Task, Verdict
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, certificate_der, fingerprint, new_key
from anabranch.identity.signatures import check_signature, make_proof, proof_problem, update_message
from anabranch.server.export import export_run
from anabranch.server.proofs import keep_authority, read_authorities
from anabranch.server.verify import LISTED, verify

PAYLOAD = np.ones(8, np.float32).tobytes()


def member(guarded: Federation, name: str = "device-1") -> SigningDevice:
    """A device that is enrolled."""
    device = guarded.device(guarded.joined(name))
    device.enrol()
    return device


def refused(call: Callable[[], object]) -> str:
    """The class of the error that a call fails with."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    return next(str(m.value) for m in error.value.trailing_metadata() if m.key == "anabranch-error")


def test_a_signed_update_is_taken_and_kept_with_its_signature(guarded: Federation) -> None:
    device = member(guarded)
    device.work()
    device.work()
    guarded.served.close()
    found = verify(guarded.data_dir)
    assert (found.problems, found.updates, found.signed) == ((), 2, 2)
    assert verify(guarded.data_dir, ca_sha256=guarded.authority.sha256).problems == ()
    other = verify(guarded.data_dir, ca_sha256="ab" * 32)
    assert [p for p in other.problems if "not signed by the authority" in p] == list(other.problems)
    assert len(other.problems) == 2
    both = f"{'ab' * 32},{guarded.authority.sha256}"
    assert verify(guarded.data_dir, ca_sha256=both).problems == (), "one after the other"


def test_a_long_list_of_problems_is_cut(guarded: Federation) -> None:
    """A change of authority, forgotten in the question, makes one of every update."""
    device = member(guarded)
    for _ in range(LISTED + 3):
        device.work()
    guarded.served.close()
    done = anabranch(guarded.data_dir, "verify", ".", "--ca-sha256", "ab" * 32, "--ca-sha256", "cd" * 32)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (31, LISTED + 2), done.stderr
    assert lines[0].endswith(f"{LISTED + 3} problems:")
    assert lines[-1] == "- and 3 others (--json has all)"
    good = anabranch(
        guarded.data_dir, "verify", ".", "--ca-sha256", "ab" * 32, "--ca-sha256", guarded.authority.sha256
    )
    assert good.returncode == 0, good.stderr


def test_the_transport_signs(guarded: Federation) -> None:
    transport = guarded.transport(guarded.joined("device-1"))
    spec = transport.enrol(Capability()).spec
    task = transport.ask(Ask("device-1", "task-1"), spec)
    assert isinstance(task, Task)
    entry = UpdateEntry(
        "update-1", "task-1", spec.layout_hash, 0, 3, 4, "raw", PAYLOAD, 8, metrics={"loss": 1}
    )
    assert transport.push(entry).decision.verdict is Verdict.PUBLISHED
    assert transport.push(entry).duplicate


def test_an_update_without_a_signature(guarded: Federation) -> None:
    device = member(guarded)
    task = device.task()
    for signature in (b"", b"junk", b"\x30" * 72):
        assert refused(partial(device.answer, task, signature=signature)) == "InvalidSignature"
    assert device.answer(task).decision.verdict == "published"  # nothing was logged of the others


@pytest.mark.parametrize(
    "other",
    [
        {"update_id": "update-2"},
        {"task_id": "task-2"},
        {"client_id": "device-2"},
        {"base_version": 1},
        {"examples": 1000},
        {"local_steps": 9},
        {"submodel": {"kept": ["ff"]}},
        {"payload": {"codec": "raw", "sha256": "ab" * 32, "size_bytes": 32}},
        {"run_id": "another run"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_signature_of_something_else(guarded: Federation, other: dict[str, Any]) -> None:
    device = member(guarded)
    task = device.task()
    header = device.header(task, PAYLOAD, "update-1", signature=b"")
    wrong = device.signature(header, **other)
    assert refused(lambda: device.send(task, PAYLOAD, "update-1", signature=wrong)) == "InvalidSignature"
    right = device.signature(header)
    assert device.send(task, PAYLOAD, "update-1", signature=right).decision.verdict == "published"


def test_a_signature_by_another_key(guarded: Federation) -> None:
    device, other = member(guarded), guarded.joined("device-2")
    task = device.task()
    header = device.header(task, PAYLOAD, "update-1", signature=b"")
    message = update_message(device.run_id, record_of(header))
    for signature in (other.sign(message), device.wallet.sign(b"update" + message)):
        push = partial(device.send, task, PAYLOAD, "update-1", signature=signature)
        assert refused(push) == "InvalidSignature"


def test_other_bytes_than_were_signed(guarded: Federation) -> None:
    device = member(guarded)
    task = device.task()
    header = device.header(task, PAYLOAD, "update-1")
    changed = bytes(32)
    assert refused(lambda: device.stub.PushUpdate(requests(header, chunks(changed)))) == "InvalidUpdate"


# --- what verify finds ------------------------------------------------------------------------------------


def tamper(data_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record of the first update in the log, as somebody with the disk may."""
    with sqlite3.connect(data_dir / "anabranch.db") as database:
        query = "SELECT seq, record FROM events WHERE kind = 'update' ORDER BY seq LIMIT 1"
        seq, text = database.execute(query).fetchone()
        record = json.loads(text)
        change(record)
        line = json.dumps(record, sort_keys=True, separators=(",", ":"))
        database.execute("UPDATE events SET record = ? WHERE seq = ?", (line, seq))
    database.close()


def _more_weight(record: dict[str, Any]) -> None:
    record["examples"] += 1


def _another_signature(record: dict[str, Any]) -> None:
    record["proof"]["signature"] = record["proof"]["certificate"]


def _no_base64(record: dict[str, Any]) -> None:
    record["proof"]["certificate"] = "%"


def _half(record: dict[str, Any]) -> None:
    del record["proof"]["certificate"]
    record["proof"]["certificate"] = ""


@pytest.mark.parametrize("change", [_more_weight, _another_signature, _no_base64, _half])
def test_a_log_that_was_changed_is_found_out(
    guarded: Federation, change: Callable[[dict[str, Any]], None]
) -> None:
    member(guarded).work()
    guarded.served.close()
    assert verify(guarded.data_dir).problems == ()
    tamper(guarded.data_dir, change)
    assert [p for p in verify(guarded.data_dir).problems if "is not proved" in p]


def test_an_update_whose_proof_was_taken_away(guarded: Federation) -> None:
    member(guarded).work()
    guarded.served.close()
    tamper(guarded.data_dir, lambda record: record.pop("proof"))
    found = verify(guarded.data_dir, ca_sha256=guarded.authority.sha256)
    assert [p for p in found.problems if "is not signed" in p]


def test_the_proofs_are_in_the_exported_journal(guarded: Federation, tmp_path: Path) -> None:
    member(guarded).work()
    guarded.served.close()
    exported = export_run(guarded.data_dir, "", tmp_path / "run")
    assert exported
    lines = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    (record,) = [r for r in map(json.loads, lines) if r.get("kind") == "update"]
    assert guarded.served.info is not None
    assert proof_problem(guarded.served.info.run_id, record, [guarded.authority.certificate]) is None


# --- the message ------------------------------------------------------------------------------------------

RECORDS = st.fixed_dictionaries(
    {
        "base_version": st.integers(0, 2**53),
        "client_id": st.text("abc", min_size=1),
        "examples": st.integers(1, 10**9),
        "local_steps": st.integers(0, 10**6),
        "submodel": st.none() | st.lists(st.integers(0, 9)),
        "task_id": st.text("abc", min_size=1),
        "update_id": st.text("abc", min_size=1),
        "payload": st.fixed_dictionaries(
            {
                "codec": st.sampled_from(["raw", "topk(0.1)"]),
                "sha256": st.text("01", min_size=64, max_size=64),
                "size_bytes": st.integers(0, 9),
            }
        ),
    }
)


@given(a=RECORDS, b=RECORDS, runs=st.tuples(st.text("xy"), st.text("xy")))
def test_different_updates_have_different_messages(
    a: dict[str, Any], b: dict[str, Any], runs: tuple[str, str]
) -> None:
    same = a == b and runs[0] == runs[1]
    assert (update_message(runs[0], a) == update_message(runs[1], b)) == same


def test_what_is_not_signed_does_not_matter() -> None:
    record = {"base_version": 0, "client_id": "a", "examples": 1, "local_steps": 0, "submodel": None}
    record |= {"task_id": "t", "update_id": "u"}
    payload = {"codec": "raw", "sha256": "ab" * 32, "size_bytes": 4}
    more = {"now": 5.0, "metrics": {"loss": 1.0}, "flaw": ""}
    plain = {**record, "payload": payload}
    assert update_message("r", plain) == update_message(
        "r", {**plain, **more, "payload": {**payload, "values": 3}}
    )
    assert update_message("r", plain) == (
        b'anabranch update 1\n{"base_version":0,"client_id":"a","examples":1,"local_steps":0,"payload":'
        b'{"codec":"raw","sha256":"' + b"ab" * 32 + b'","size_bytes":4},"run_id":"r","submodel":null,'
        b'"task_id":"t","update_id":"u"}'
    )


def test_seals_are_signed_where_there_are_some() -> None:
    record = {"base_version": 0, "client_id": "a", "examples": 1, "local_steps": 0, "submodel": None}
    record |= {"task_id": "t", "update_id": "u", "payload": {"codec": "c", "sha256": "", "size_bytes": 4}}
    plain = update_message("r", record)
    assert update_message("r", {**record, "seals": {}}) == plain
    sealed = update_message("r", {**record, "seals": {"k": "Ym94"}})
    assert sealed == plain.replace(b'"submodel"', b'"seals":{"k":"Ym94"},"submodel"')


def test_a_proof_is_of_its_client_its_authority_and_its_time(authority: Authority, tmp_path: Path) -> None:
    wallet = issued(authority, Kind.DEVICE, "a", tmp_path / "a")
    operator = issued(authority, Kind.OPERATOR, "a", tmp_path / "operator")
    record: dict[str, Any] = {"base_version": 0, "client_id": "a", "examples": 1, "local_steps": 0}
    record |= {"submodel": None, "task_id": "t", "update_id": "u", "now": authority.now()}
    record["payload"] = {"codec": "raw", "sha256": "ab" * 32, "size_bytes": 4}

    def problem(
        signer: Any = wallet, authorities: Any = (authority.certificate,), at: float = 0.0, **other: Any
    ) -> str:
        proof = make_proof(signer.certificate, signer.sign(update_message("run", record)), at)
        signed = {**record, "proof": {k: v for k, v in vars(proof).items() if v}}
        return proof_problem("run", {**signed, **other}, authorities) or ""

    assert problem() == ""
    assert "not signed by the authority" in problem(authorities=())
    assert "operator 'a'" in problem(signer=operator)
    assert "device 'a'" in problem(client_id="b")
    late = record["now"] + 2 * 86400
    assert "not valid then" in problem(now=late)
    assert problem(now=late, at=record["now"]) == ""  # by the time of day, where it was written down
    assert "not valid then" in problem(at=late)
    assert "not of what came" in problem(task_id="other")


def test_a_signature_of_no_key_of_ours() -> None:
    key = new_key()
    with pytest.raises(InvalidSignature):
        check_signature(key.public_key(), b"", b"message")


def test_certificates_in_proofs_are_der(authority: Authority, tmp_path: Path) -> None:
    wallet = issued(authority, Kind.DEVICE, "a", tmp_path / "a")
    assert len(certificate_der(wallet.certificate)) < 600  # a proof is small beside its update


def test_who_serves_with_an_authority_that_was_replaced_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Authority.create(tmp_path / "old") as old, Authority.create(tmp_path / "new") as new:
        for at_this_start in (old, old, new, new):
            keep_authority(tmp_path, at_this_start)
        assert not caplog.messages
        keep_authority(tmp_path, old)
        (told,) = caplog.messages
        assert (
            f"{tmp_path / 'old'} has the authority {old.sha256}, and this run has gone on to {new.sha256}"
            in told
        )
        assert [fingerprint(c) for c in read_authorities(tmp_path)] == [old.sha256, new.sha256]
