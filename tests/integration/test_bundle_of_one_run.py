"""A server of one run has the code of its App for devices that allow who signed it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from commands import anabranch, answer, serving
from nursery import COMMAND, PIPE, Process

RUN = '[run]\nupdates_max = 3\n[strategy]\nname = "fedasync"\n[client]\nsteps = 2\n'
ADDRESSES = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")


def test_a_device_without_an_app_works_at_the_only_run(tmp_path: Path) -> None:
    signer = answer(anabranch(tmp_path, "bundle", "key", "--out", "signer.key", "--json"))["signer"]
    answer(anabranch(tmp_path, "new", "wards", "--template", "numpy", "--json"))
    made = ("wards/app.py:App", "--key", "signer.key", "--out", "wards.bundle")
    answer(anabranch(tmp_path, "bundle", "make", *made, "--json"))
    answer(anabranch(tmp_path, "init", "wards/app.py:App", "--out", "model", "--json"))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "device").mkdir()
    with serving(tmp_path, "run.toml", "--model", "model", "--bundle", "wards.bundle", *ADDRESSES) as said:
        words = ("client", "--jobs", "--server", said["address"], "--id", "ward-1", "--signer", signer)
        with Process(COMMAND, *words, "--json", cwd=tmp_path / "device", stdout=PIPE) as device:
            assert device.stdout is not None
            told = []
            for line in device.stdout:
                told.append(json.loads(line))
                if told[-1]["kind"] == "ended":
                    break
            device.send_signal(signal.SIGINT)
            device.communicate(timeout=600)
    kinds = [event["kind"] for event in told]
    assert kinds.count("pushed") == 3
    opened = told[kinds.index("opened")]
    assert (opened["signer"], opened["job"]) == (signer, "")
    assert told[-1]["code"] == 0


def test_a_bundle_that_is_none_is_said_before_anything_is_served(tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    absent = anabranch(tmp_path, "server", "--model", "model", "--bundle", "wards.bundle", *ADDRESSES)
    assert absent.returncode != 0
    assert "wards.bundle is not there: `anabranch bundle make` writes one" in absent.stderr
    (tmp_path / "wards.bundle").write_bytes(b"anabranch bundle 1\nnothing\n")
    damaged = anabranch(tmp_path, "server", "--model", "model", "--bundle", "wards.bundle", *ADDRESSES)
    assert damaged.returncode != 0
    assert not (tmp_path / "data" / "anabranch.db").exists()
    several = anabranch(tmp_path, "server", "--jobs", "jobs", "--bundle", "wards.bundle")
    assert (several.returncode, "--bundle with --jobs" in several.stderr) == (2, True)
