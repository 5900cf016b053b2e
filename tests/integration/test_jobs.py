"""Several runs on one server: each has its own run, and what happens to one happens to no other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from commands import anabranch
from hand_bundles import whole
from job_hosts import FIRST, UNHELD, Host, spec, with_job
from own_parts import FOLDER, forgotten
from rival_orders import check_one_is_refused
from streams import Stream, StreamDevice, stream
from wire import CALL_S, Device, Served, server_config

from anabranch.api.jobs import add_job, read_job
from anabranch.cli.health import health
from anabranch.client.channel import open_channel
from anabranch.client.jobs import serve_jobs
from anabranch.client.operator import open_operator
from anabranch.client.run import ClientOptions
from anabranch.client.stopping import Bell
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError, FolderMissing, StoreCorrupt, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, KIB
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import jobs_pb2
from anabranch.protos.v1.jobs_pb2_grpc import JobsStub
from anabranch.server.job import HostedJob, JobState
from anabranch.server.job_folder import DATA, NOTE, SETTINGS, add, note_of, set_stopped
from anabranch.server.job_metrics import OfJobs
from anabranch.server.jobs import Jobs
from anabranch.server.manifest import write_manifest
from anabranch.server.metrics import LEADER, Metrics
from anabranch.server.verify import verify
from anabranch.server.writer import Writer

RUNNING, STOPPED, FAILED, ENDED = JobState.RUNNING, JobState.STOPPED, JobState.FAILED, JobState.ENDED


def status_of(call: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    return call.code(), call.details() or ""


def listed(device: Device, address: str) -> list[str]:
    """The jobs that a device may serve."""
    with open_channel(address) as channel:
        request = jobs_pb2.ListJobsRequest(client_id=device.client_id)
        return [job.name for job in JobsStub(channel).ListJobs(request).jobs]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Jobs `one` and `two`."""
    for name in ("one", "two"):
        with_job(tmp_path, name, UNHELD)
    return tmp_path


def test_no_chunk_of_a_job_is_larger_than_its_servers_messages(tmp_path: Path) -> None:
    """What a job says of its own chunks holds as far as the ports take it: they are the server's."""
    host = merge([("host", {"limits": {"message_bytes_max": 200_000}})])
    said = {"silent": "", "small": "chunk_bytes_max = 70_000\n", "large": "chunk_bytes_max = 1_000_000\n"}
    for name, line in said.items():
        with_job(tmp_path, name, "[limits]\n" + line)
    found = {}
    for name in said:
        job, _ = read_job(host, tmp_path / "jobs" / name, tmp_path / "jobs" / name / "data")
        found[name] = job.limits.chunk_bytes_max
    assert found == {"silent": 200_000 - 64 * KIB, "small": 70_000, "large": 200_000 - 64 * KIB}


def test_each_job_has_a_run_of_its_own(two: Path) -> None:
    with Host(two) as host:
        for name in ("one", "two"):
            host.until(name, RUNNING)
        one, other = host.device("one"), host.device("two")
        ids = {one.enrol().run_id, other.enrol().run_id}
        assert len(ids) == 2
        assert [one.work(1.0).version for _ in range(3)] == [1, 2, 3]
        assert other.work(5.0).version == 1
        assert {n: (j.state, j.version) for n, j in host.jobs().items()} == {
            "one": ("running", 3),
            "two": ("running", 1),
        }
        first, second = host.operator("one").status(), host.operator("two").status()
        assert (first.run, first.updates_applied, second.run, second.updates_applied) == ("one", 3, "two", 1)
    for name in ("one", "two"):
        data = two / "jobs" / name / "data"
        assert verify(data).problems == ()


@contextmanager
def over_stream(host: Host, job: str, client_id: str = "device-1") -> Iterator[StreamDevice]:
    """A device of a job whose requests go over a stream, but for its enrolment."""
    with open_channel(f"{host.info.address}/{job}") as channel:
        device = StreamDevice(channel, spec(), client_id)
        device.enrol()
        yield device
        device.close()


@contextmanager
def idle(host: Host, job: str) -> Iterator[Stream]:
    """A stream of a job's device that was answered once."""
    with open_channel(f"{host.info.address}/{job}") as channel, stream(channel) as made:
        made.say(heartbeat=devices.HeartbeatRequest(client_id="device-1", task_id="t"))
        assert made.hear().head.WhichOneof("answer") == "heartbeat"
        yield made


def test_an_outage_of_a_jobs_store_is_said_once(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of jobs makes what answers anew for each call; what lasts stands with the run."""

    async def damaged(*_: object) -> str:
        raise StoreCorrupt("a row of model_versions cannot be read")

    with Host(two) as host:
        host.until("one", RUNNING)
        device = host.device("one")
        device.enrol()
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "head_of", damaged)
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match="its log says why"):
                    device.task()
    said = [record.message for record in caplog.records if "come again" in record.message]
    assert len(said) == 1, said
    assert "model_versions" in said[0]


def test_a_stream_is_of_the_job_that_it_names(two: Path) -> None:
    with Host(two) as host:
        for name in ("one", "two"):
            host.until(name, RUNNING)
        with over_stream(host, "one") as one, over_stream(host, "two") as other:
            streams = one._stream, other._stream
            assert [one.work(1.0).version for _ in range(3)] == [1, 2, 3]
            assert other.work(5.0).version == 1
            assert (one.fetch()[0].version, other.fetch()[0].version) == (3, 1)
            assert (one._stream, other._stream) == streams, "all of it over one stream each"
        with open_channel(f"{host.info.address}/three") as channel, stream(channel) as lost:
            assert lost.over() == ("UNAVAILABLE", "Unavailable")
        with open_channel(host.info.address) as channel, stream(channel) as lost:
            assert lost.over() == ("INVALID_ARGUMENT", "ConfigError")


def test_streams_end_with_their_job_and_no_other(two: Path) -> None:
    with Host(two, server={"drain_s": 10 * CALL_S}) as host:
        for name in ("one", "two"):
            host.until(name, RUNNING)
        with idle(host, "one") as ended, over_stream(host, "two") as other:
            stays = other._stream
            set_stopped(two / "jobs" / "one", True)
            host.until("one", STOPPED)  # long before it would have given up on who is idle
            assert ended.over() == ("OK", "")
            assert other.work().version == 1
            assert other._stream is stays
            draining = threading.Thread(target=host.close)
            draining.start()
            assert stays.over() == ("OK", "")
            draining.join(CALL_S)
    assert host.exit_code == 0


def test_who_is_of_a_job_no_more_is_not_over_an_open_stream_either(tmp_path: Path) -> None:
    job = with_job(tmp_path, "wards", UNHELD, ("ward-*", "lab-1"))
    with Host(tmp_path) as host:
        host.until("wards", RUNNING)
        with over_stream(host, "wards", "ward-7") as ward, over_stream(host, "wards", "lab-1") as lab:
            assert (ward.work().version, lab.work().version) == (1, 2)
            note = json.loads((job / NOTE).read_text())
            (job / NOTE).write_text(json.dumps({**note, "devices": ["ward-*"]}))
            assert lab._stream.over() == ("OK", "")
            with pytest.raises(grpc.RpcError) as raised:
                lab.ask()
            assert status_of(raised.value)[0] is grpc.StatusCode.PERMISSION_DENIED
            assert ward.work().version == 3


def test_all_jobs_together_have_as_many_streams_as_one_run_has(two: Path) -> None:
    with Host(two, replace(DEFAULT_LIMITS, rpcs_max=6)) as host, ExitStack() as stack:
        for name in ("one", "two"):
            host.until(name, RUNNING)
            host.device(name).enrol()
        for name in ("one", "two", "one"):
            stack.enter_context(idle(host, name))
        for name in ("one", "two"):
            with open_channel(f"{host.info.address}/{name}") as channel, stream(channel) as fourth:
                assert fourth.over() == ("OK", "")
            assert host.device(name).work().version == 1, "it makes calls"


def test_health_is_a_jobs_own_where_its_address_names_one(two: Path) -> None:
    with Host(two) as host:
        for name in ("one", "two"):
            host.until(name, RUNNING)
        assert set_stopped(two / "jobs" / "two", True)
        host.until("two", STOPPED)
        for port in (host.info.address, host.info.admin_address):
            health(port)
            health(f"{port}/one")
            with pytest.raises(Unavailable, match="job 'two' does not"):
                health(f"{port}/two")
            with pytest.raises(Unavailable, match="job 'nix' does not"):
                health(f"{port}/nix")
    with pytest.raises(Unavailable, match=rf"^{host.info.address} does not serve"):
        health(f"{host.info.address}/one")


def test_a_call_that_names_no_job_is_told_to(two: Path) -> None:
    with Host(two) as host:
        host.until("one", RUNNING)
        with pytest.raises(grpc.RpcError) as raised:
            host.device("").enrol()
        assert status_of(raised.value) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "this server serves several jobs: name one in its address, as HOST:PORT/JOB",
        )
        with pytest.raises(
            Unavailable, match="no job 'three' is served here now: `anabranch admin jobs list`"
        ):
            host.operator("three").status()
        with pytest.raises(grpc.RpcError) as streamed:
            host.device("three").fetch()
        assert status_of(streamed.value)[0] is grpc.StatusCode.UNAVAILABLE


def test_a_server_of_one_run_refuses_a_job(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", FIRST)
    with Served(server_config(tmp_path / "data"), manifest) as served, Host(tmp_path) as host:
        assert served.info is not None
        with open_channel(f"{served.info.address}/one") as channel, pytest.raises(grpc.RpcError) as raised:
            Device(channel, manifest.spec).enrol()
        assert status_of(raised.value)[1] == (
            "this server has one run and no jobs: leave /one out of its address"
        )
        assert host.jobs() == {}  # and no folder yet is no job yet


def test_a_job_is_for_the_devices_of_its_scope(tmp_path: Path) -> None:
    with_job(tmp_path, "wards", UNHELD, ("ward-*",))
    with_job(tmp_path, "all", UNHELD)
    with Host(tmp_path) as host:
        for name in ("wards", "all"):
            host.until(name, RUNNING)
        ward, other = host.device("wards", "ward-7"), host.device("wards", "lab-1")
        ward.enrol()
        assert ward.work().version == 1
        for call in (other.enrol, other.ask, lambda: other.query("u"), lambda: other.heartbeat("t")):
            with pytest.raises(grpc.RpcError) as raised:
                call()
            assert status_of(raised.value)[0] is grpc.StatusCode.PERMISSION_DENIED
        assert listed(ward, host.info.address) == ["wards", "all"]
        assert listed(other, host.info.address) == ["all"]
        assert host.jobs()["wards"].devices == ("ward-*",)


def test_what_is_wrong_with_one_job_stops_no_other(two: Path) -> None:
    broken = two / "jobs" / "two"
    (broken / "settings.toml").write_text("[strategy]\nname = 'nonsense'\n")
    with_job(two, "three", UNHELD)
    (two / "jobs" / "three" / NOTE).write_text("{}")
    with Host(two) as host:
        host.until("one", RUNNING)
        assert "nonsense" in host.until("two", FAILED)
        assert "job.json" in host.until("three", FAILED)
        device = host.device("one")
        device.enrol()
        assert device.work().version == 1
        assert {name: job.state for name, job in host.jobs().items()} == {
            "one": "running",
            "two": "failed",
            "three": "failed",
        }
        assert listed(device, host.info.address) == ["one"]
    assert host.exit_code == 0


BREAKS = f"""import sys
sys.path.insert(0, {str(FOLDER)!r})
import strategy
class Breaks(strategy.WarmUp):
    name = "breaks"
    def step(self, state, vector, update, context):
        return {{}}["speed"]
"""


def test_a_job_that_fails_by_a_part_of_ones_own_says_which_and_where(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BREAKS)
    with_job(tmp_path, "one")
    settings = f'[strategy]\nname = "{tmp_path}/mine.py:Breaks"\n'
    (tmp_path / "jobs" / "one" / "settings.toml").write_text(settings)
    with forgotten(), Host(tmp_path) as host:
        host.until("one", RUNNING)
        device = host.device("one")
        device.enrol()
        with pytest.raises(grpc.RpcError):
            device.work()
        assert re.fullmatch(
            r"strategy Breaks\.step \(.*mine\.py:7\): KeyError: 'speed'", host.until("one", FAILED)
        )


def test_two_servers_do_not_share_a_job(two: Path) -> None:
    with Host(two) as first:
        first.until("one", RUNNING)
        first.until("two", RUNNING)
        with Host(two) as second:
            assert "is in use by process" in second.until("one", FAILED)
        device = first.device("one")
        device.enrol()
        assert device.work().version == 1


def test_jobs_come_stop_go_on_and_go_while_others_are_served(tmp_path: Path) -> None:
    with_job(tmp_path, "one", UNHELD)
    with Host(tmp_path) as host:
        host.until("one", RUNNING)
        device = host.device("one")
        device.enrol()
        assert device.work().version == 1
        with_job(tmp_path, "late", UNHELD)
        host.until("late", RUNNING)
        late = host.device("late")
        late.enrol()
        assert late.work(2.0).version == 1
        assert set_stopped(tmp_path / "jobs" / "late", True)
        assert not set_stopped(tmp_path / "jobs" / "late", True)
        host.until("late", STOPPED)
        with pytest.raises(grpc.RpcError) as raised:
            late.ask()
        assert status_of(raised.value)[0] is grpc.StatusCode.UNAVAILABLE
        assert device.work().version == 2
        assert set_stopped(tmp_path / "jobs" / "late", False)
        host.until("late", RUNNING)
        assert late.work(2.0).version == 2  # of its own run, which has gone on
        (tmp_path / "jobs" / "late").rename(tmp_path / "gone")
        host.until("late", STOPPED)
        assert device.work().version == 3
    assert verify(tmp_path / "gone" / "data").problems == ()


def test_a_run_that_has_ended_is_nothing_to_do(tmp_path: Path) -> None:
    with_job(tmp_path, "short", f"[run]\nupdates_max = 2\n{UNHELD}")
    with_job(tmp_path, "long", UNHELD)
    with Host(tmp_path) as host:
        host.until("short", RUNNING)
        host.until("long", RUNNING)
        device = host.device("short")
        device.enrol()
        assert listed(device, host.info.address) == ["short", "long"]
        assert [device.work().version for _ in range(2)] == [1, 2]
        assert "2 updates" in host.until("short", ENDED)
        assert listed(device, host.info.address) == ["long"]
        assert device.fetch()[0].version == 2  # its last version is still served


def test_who_works_at_a_run_when_it_ends_has_not_failed(tmp_path: Path) -> None:
    """Its process is ended by a signal, which counts as no failure that it would have to wait for."""
    with_job(tmp_path, "short", f"[run]\nupdates_max = 1\n{UNHELD}")
    with Host(tmp_path) as host, ExitStack() as stack:
        host.until("short", RUNNING)
        device = host.device("short")
        device.enrol()
        bell, codes = Bell(), list[int]()

        def begin(*_: object) -> subprocess.Popen[bytes]:
            worker = subprocess.Popen(["sleep", "3600"])
            stack.callback(worker.kill)
            assert device.work().version == 1
            return worker

        def tell(kind: str, **data: int) -> None:
            if kind == "ended":
                codes.append(data["code"])
                bell.stop()

        serve_jobs(
            ClientOptions("synthetic", host.info.address, "b", state_dir=tmp_path / "b"), begin, tell, bell
        )
        assert codes == [0]


def test_a_restart_resumes_all_of_them(two: Path) -> None:
    for expected in (1, 2):
        with Host(two) as host:
            for name, value in (("one", 1.0), ("two", 4.0)):
                host.until(name, RUNNING)
                device = host.device(name)
                device.enrol()
                assert device.work(value).version == expected


def test_prometheus_reads_each_job(two: Path) -> None:
    with Host(two, server={"metrics_address": "127.0.0.1:0"}) as host:
        for name, updates in (("one", 1), ("two", 2)):
            host.until(name, RUNNING)
            device = host.device(name)
            device.enrol()
            for _ in range(updates):
                device.work()
        with urllib.request.urlopen(f"http://{host.info.metrics_address}/metrics") as page:
            text = page.read().decode()
    lines = [line for line in text.splitlines() if "verdict=" in line]
    assert 'anabranch_updates_total{job="one",reason="",verdict="published"} 1.0' in lines
    assert 'anabranch_updates_total{job="two",reason="",verdict="published"} 2.0' in lines
    assert text.count("# TYPE anabranch_updates_total") == 1
    assert 'anabranch_calls_total{code="OK",method="PushUpdate"} 3.0' in text.splitlines()


def test_a_job_that_failed_is_in_the_log_and_leads_nothing(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A series that went away would fire no alert, and a line on stdout is in no log."""
    (two / "jobs" / "one" / "settings.toml").write_text("nonsense", encoding="utf-8")
    with Host(two, server={"metrics_address": "127.0.0.1:0"}) as host:
        host.until("one", FAILED)
        host.until("two", RUNNING)
        with urllib.request.urlopen(f"http://{host.info.metrics_address}/metrics") as page:
            lines = page.read().decode().splitlines()
        assert 'anabranch_leader{job="one"} 0.0' in lines
        assert 'anabranch_leader{job="two"} 1.0' in lines
    (said,) = {r.getMessage() for r in caplog.records if r.levelname == "ERROR"}
    assert said.startswith("job one has failed, and is tried again in 5 s: "), said


def test_the_run_of_a_server_of_one_is_a_job_without_a_name(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", FIRST)
    config = server_config(tmp_path / "data", run={"updates_max": 1})
    with Served(config, manifest) as served:
        assert served.info is not None
        device = served.device()
        assert listed(device, served.info.address) == [""]
        device.work()
        assert listed(device, served.info.address) == []
        with open_operator(served.info.admin_address, None) as operator:
            (job,) = operator.jobs()
        assert (job.name, job.state, job.version) == ("", "ended", 1)


def test_a_job_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    job = with_job(tmp_path, "one", devices=("a", "b-*"))
    assert json.loads((job / NOTE).read_text())["devices"] == ["a", "b-*"]
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {"one"}
    for folder in (tmp_path / "jobs", job, job / "model"):
        assert folder.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="there is a job 'one'"):
        with_job(tmp_path, "one")
    with pytest.raises(ConfigError, match=r"job must be .*not '\.\./two', which has '/'"):
        with_job(tmp_path, "two") and add_job(tmp_path / "jobs", "../two", None, tmp_path / "model")
    bad = tmp_path / "bad.toml"
    bad.write_text("[strategy]\nname = 'nonsense'\n")
    with pytest.raises(ConfigError, match="nonsense"):
        add_job(tmp_path / "jobs", "three", bad, tmp_path / "model")
    with pytest.raises(ConfigError, match="empty pattern"):
        add_job(tmp_path / "jobs", "three", None, tmp_path / "model", devices=["ward-*", ""])
    assert not (tmp_path / "jobs" / "three").exists()


def test_a_folder_without_a_note_is_said_to_be_no_job(tmp_path: Path) -> None:
    """As where data were moved there by hand: one order said that there is such a job, another none."""
    jobs = tmp_path / "jobs"
    (jobs / "moved" / DATA).mkdir(parents=True)
    why = rf"moved has no {re.escape(NOTE)}, and is no job without: move it away, and add the job"
    with pytest.raises(ConfigError, match=why):
        with_job(tmp_path, "moved")
    with pytest.raises(FolderMissing, match=why):
        note_of(jobs / "moved")
    with pytest.raises(FolderMissing, match="there is no job 'gone'"):
        note_of(jobs / "gone")


def test_of_two_who_add_jobs_of_one_name_at_once_one_is_told(tmp_path: Path) -> None:
    """The first one's settings come late, by a pipe: it was at work when the second one came and went."""
    write_manifest(tmp_path / "model", "test", FIRST)
    late, early = tmp_path / "late", tmp_path / "early"
    os.mkfifo(late)
    early.write_text("[run]\nname = 'early'\n")
    jobs = tmp_path / "jobs"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(add, jobs, "one", late, tmp_path / "model", (), 1.0)
        with late.open("w") as pipe:  # from here on it reads
            job = add(jobs, "one", early, tmp_path / "model", (), 2.0)
            pipe.write("[run]\nname = 'late'\n")
        with pytest.raises(ConfigError, match="there is a job 'one'"):
            first.result()
    assert (job / SETTINGS).read_text() == early.read_text()
    assert {path.name for path in jobs.iterdir()} == {"one"}


def test_a_bundle_of_another_app_than_the_models_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "app.bundle").write_bytes(whole())
    job = with_job(tmp_path, "one")
    manifest = job / "model" / "manifest.json"

    def add(name: str, app: str) -> str:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"app": app}))
        caplog.clear()
        add_job(tmp_path / "jobs", name, None, job / "model", bundle=tmp_path / "app.bundle")
        return caplog.text

    assert "the bundle has the App app:Mine, and the model is of synthetic" in add("two", "synthetic")
    assert "the model is of here/app.py:Other" in add("three", "here/app.py:Other")
    assert add("four", "here/app.py:Mine") == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategy", "teasq", "--data-dir", "x"), "--strategy, --data-dir with --jobs"),
        (("--flower", "app"), "--flower with --jobs"),
    ],
)
def test_options_of_one_run_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, "server", "--jobs", "jobs", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_settings_of_runs_that_a_server_of_jobs_is_given_are_said_to_count_for_nothing(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Host(two, server={"drain_s": 3.0, "staleness_max": 4}, run={"updates_max": 7}) as host:
        host.until("one", RUNNING)
        assert host.operator("one").status().config["server"]["staleness_max"] == 0
    (said,) = [r.getMessage() for r in caplog.records if "does not go by" in r.getMessage()]
    assert "run.updates_max" in said
    assert "server.staleness_max" in said
    assert "drain_s" not in said


def test_a_job_that_is_stopped_is_not_said_to_lead_nothing(two: Path) -> None:
    """An alert fires for what no server leads; this one is led by nobody because somebody wants it so."""
    away, job = Metrics(), HostedJob(two / "jobs" / "one", state=RUNNING)
    jobs = Jobs(two / "jobs", lambda *_: (_ for _ in ()).throw(ConfigError("none")), None)
    jobs._jobs["one"] = job
    leads = [s for metric in OfJobs(away, jobs).collect() if metric.name == LEADER for s in metric.samples]
    assert [s.value for s in leads] == [0.0], "it has failed, and nobody has said so yet"
    job.stop.set()
    assert not [metric for metric in OfJobs(away, jobs).collect() if metric.name == LEADER]


def test_of_two_orders_at_once_that_do_not_agree_one_is_refused(two: Path) -> None:
    """As by a server of one run; a job answers each call by a service of its own."""
    with Host(two) as host:
        host.until("one", RUNNING)
        check_one_is_refused(host.operator("one"), host.operator("one"))
