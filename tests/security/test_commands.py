"""The five commands of a federation that others can reach, as their user meets them: real processes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from commands import anabranch, answer, serving

from anabranch.core.errors import OUTCOMES, ConfigError, NotAuthenticated

RUN = """
[run]
workload = "synthetic"
updates_max = 6
[fleet]
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 2
"""


def test_five_commands_make_a_federation(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    sha256 = answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))["ca_sha256"]
    assert answer(anabranch(tmp_path, "admin", "ca", "show", "--json"))["ca_sha256"] == sha256
    addresses = ("--address", "0.0.0.0:0", "--admin-address", "0.0.0.0:0", "--data-dir", "data")
    with serving(tmp_path, "run.toml", "--model", "model", *addresses) as said:
        assert said["ca_sha256"] == sha256
        server, admin, join = (
            f"127.0.0.1:{said[key].rpartition(':')[2]}"
            for key in ("address", "admin_address", "join_address")
        )
        made = answer(anabranch(tmp_path, "admin", "enrol", "device-1", "--json"))
        (tmp_path / "token").write_text(made["token"] + "\n")
        device = ("client", "synthetic", "--server", server, "--shard", "0/2", "--state-dir", "dev", "--json")
        joining = ("--join", join, "--ca-sha256", sha256)
        done = answer(anabranch(tmp_path, *device, *joining, "--token-file", "token", "--tasks-max", 2))
        assert done["answered"] == 2
        refused = anabranch(tmp_path, *device[:-1], *joining, "--token", "x.y", "--state-dir", "other")
        assert refused.returncode == OUTCOMES[NotAuthenticated].exit_code
        answer(anabranch(tmp_path, "admin", "operator", "alice", "--out", "alice", "--json"))
        papers = ("--admin", admin, "--identity", "alice", "--json")
        assert answer(anabranch(tmp_path, "admin", "status", *papers))["updates_applied"] == 2
        look = ("evaluate", "synthetic", "--server", server, "--once")
        assert answer(anabranch(tmp_path, *look, *papers))["version"] == 1
        assert answer(anabranch(tmp_path, "health", server, "--identity", "alice", "--json"))["serving"]
        answer(anabranch(tmp_path, "admin", "revoke", "device-1", "--json"))
        out = anabranch(tmp_path, *device)  # it needs no token any more, and is out all the same
        assert out.returncode == OUTCOMES[NotAuthenticated].exit_code
        assert "is revoked" in out.stderr
        listed = anabranch(tmp_path, "admin", "members", "--json").stdout.splitlines()
        secret = made["token"].partition(".")[2]  # of what was said since, nothing has it
        said_since = [*listed, out.stdout, out.stderr, json.dumps([said, done]), refused.stderr]
        assert not [text for text in said_since if secret in text or "PRIVATE KEY" in text]
        assert [(m["name"], m["state"]) for m in map(json.loads, listed)] == [
            ("device-1", "revoked"),
            ("alice", "good"),
        ]
    assert made["token"].partition(".")[2] not in (tmp_path / "server.log").read_text()
    found = answer(anabranch(tmp_path, "verify", "data", "--ca-sha256", sha256, "--json"))
    assert (found["signed"], found["problems"]) == (2, [])


def test_what_is_refused_says_what_to_do(tmp_path: Path) -> None:
    for arguments, said in [
        (("admin", "enrol", "a"), "ca init"),
        (("admin", "revoke", "a"), "anabranch-identity is not there: name the folder that has"),
        (("admin", "members", "--folder", "."), "has no authority: name the folder"),
        (("admin", "status", "--admin", "10.0.0.1:7071"), "--identity"),
        (("admin", "status", "--identity", "nowhere"), "admin operator"),
    ]:
        done = anabranch(tmp_path, *arguments)
        assert done.returncode == OUTCOMES[ConfigError].exit_code, done.stderr
        assert said in done.stderr
    answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))
    for arguments, said in [
        (("admin", "ca", "init"), "already"),
        (("admin", "revoke", "nobody"), "members"),
        (("client", "synthetic", "--server", "10.0.0.1:7070"), "--insecure"),
        (("client", "synthetic", "--token-file", "nowhere"), "--token-file"),
    ]:
        done = anabranch(tmp_path, *arguments)
        assert done.returncode == OUTCOMES[ConfigError].exit_code, done.stderr
        assert said in done.stderr


@pytest.mark.parametrize("insecure", [False, True])
def test_insecure_is_said_aloud(tmp_path: Path, insecure: bool) -> None:
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    arguments: list[object] = ["--model", "model", "--address", "0.0.0.0:0", "--admin-address", "127.0.0.1:0"]
    if insecure:
        with serving(tmp_path, *arguments, "--insecure") as said:
            port = int(said["address"].rpartition(":")[2])
            assert (said["join_address"], said["ca_sha256"]) == ("", "")
            with socket.create_connection(("127.0.0.1", port), timeout=600):
                assert answer(anabranch(tmp_path, "health", f"127.0.0.1:{port}", "--json"))["serving"]
        return
    done = anabranch(tmp_path, "server", *arguments)
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert "--insecure" in done.stderr


def test_an_evaluator_beside_a_guarded_server(tmp_path: Path) -> None:
    """As the documents begin: the devices' port wants papers, the operators' is loopback, in the clear."""
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))
    answer(anabranch(tmp_path, "admin", "operator", "alice", "--out", "alice", "--json"))
    addresses = ("--address", "0.0.0.0:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    with serving(tmp_path, "--model", "model", *addresses) as said:
        server = f"127.0.0.1:{said['address'].rpartition(':')[2]}"
        look = ("evaluate", "synthetic", "--server", server, "--once", "--json")
        reported = ("--admin", said["admin_address"])
        assert answer(anabranch(tmp_path, *look, *reported, "--identity", "alice"))["version"] == 0
        assert answer(anabranch(tmp_path, "admin", "status", *reported, "--json"))["best_version"] == 0
        told = anabranch(tmp_path, "admin", "status", *reported, "--identity", "alice")
        assert "an operator leaves out --identity" in told.stderr
        for without in (look, (*look, *reported)):
            done = anabranch(tmp_path, *without)
            assert done.returncode == OUTCOMES[NotAuthenticated].exit_code, done.stderr
            assert "--identity" in done.stderr


def test_strangers_do_not_fill_the_log(tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))
    addresses = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    with serving(tmp_path, "--model", "model", *addresses, "--set", 'identity.tls="always"') as said:
        for port in (
            int(said[key].rpartition(":")[2]) for key in ("address", "admin_address", "join_address")
        ):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=600) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    stranger.recv(1000)  # until it was looked at, and cut off
    assert len((tmp_path / "server.log").read_text().splitlines()) < 10
