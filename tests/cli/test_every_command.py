"""Every command that `--help` lists, as its user types it: on a plain server and a guarded one, with and
without `--json`. A new command fails here until `COMMANDS` says how it is called."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from click import Command, Context, Group  # noqa: TID251 - that of developers has them
from commands import anabranch, answer, command_line, serving, started
from guarded import issued
from left import loggers_put_back, stdout_put_back
from nursery import COMMAND, PIPE, Process
from proving import in_slices
from rich.text import Text

from anabranch.cli.main import main
from anabranch.core.errors import OUTCOMES, ConfigError, NotAuthenticated
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind

RUN = """
[run]
workload = "synthetic"
updates_max = 1000
[fleet]
clients = 2
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 1
"""
SMALL = ("--set", "run.updates_max=4", "--set", "fleet.clients=2")
ELSEWHERE = "10.0.0.1:7071"


@dataclass
class Place:
    """A server, and what its users have."""

    folder: Path
    server: str
    admin: str
    papers: tuple[str, ...]  # an operator's, where the ports are guarded
    joining: tuple[str, ...]

    @property
    def ca(self) -> Path:
        """The authority's folder."""
        return self.folder / "anabranch-identity"

    @property
    def operator(self) -> list[object]:
        """How every operators' command is told whom to speak to."""
        return ["--admin", self.admin, *self.papers]

    def device(self, name: str) -> list[object]:
        """The options of a device that has never been here."""
        if not self.joining:
            return ["--server", self.server, "--id", name]
        token = answer(anabranch(self.folder, "admin", "enrol", name, "--json"))["token"]
        return ["--server", self.server, *self.joining, "--token", token]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both servers begin with: a model, an authority, and the folder of a simulation."""
    folder: Path = tmp_path_factory.mktemp("base")
    (folder / "run.toml").write_text(RUN)
    answer(anabranch(folder, "init", "synthetic", "--out", "model", "--json"))
    answer(anabranch(folder, "admin", "ca", "init", "--json"))
    answer(anabranch(folder, "simulate", "run.toml", *SMALL, "--out", "run", "--json"))
    return folder


def serve(folder: Path, guarded: bool, stack: ExitStack) -> Place:
    """A server process."""
    addresses = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    tls = "identity.tls=always" if guarded else "identity.tls=auto"
    said = stack.enter_context(serving(folder, "run.toml", "--model", "model", *addresses, "--set", tls))
    return found(folder, said, guarded)


def found(folder: Path, said: Mapping[str, str], guarded: bool) -> Place:
    """Where a server said that it serves."""
    joining = ("--join", said["join_address"], "--ca-sha256", said["ca_sha256"]) if guarded else ()
    return Place(folder, said["address"], said["admin_address"], (), joining)


def train(at: Place, cwd: Path, name: str, tasks: int) -> None:
    """A device does some tasks."""
    done = anabranch(cwd, "client", "synthetic", *at.device(name), "--tasks-max", tasks, "--json")
    assert answer(done)["answered"] == tasks


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """On loopback, in the clear. It was stopped once, with four updates: its data then lie in `stopped`."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("plain"), dirs_exist_ok=True)
    with ExitStack() as stack:
        train(serve(folder, False, stack), folder, "device-1", 4)
    shutil.copytree(folder / "data", folder / "stopped")
    with ExitStack() as stack:
        made = serve(folder, False, stack)
        # Whoever watches hears of something, whichever command comes first.
        answer(
            anabranch(folder, "admin", "quarantine", "device-8", "--why", "a test", *made.operator, "--json")
        )
        yield made


@pytest.fixture(scope="module")
def guarded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With mutual TLS on every port."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("guarded"), dirs_exist_ok=True)
    answer(anabranch(folder, "admin", "operator", "alice", "--json"))
    with ExitStack() as stack:
        made = serve(folder, True, stack)
        train(made, folder, "device-1", 4)
        made.papers = ("--identity", str(folder / "alice"))
        yield made


def flower_app(cwd: Path) -> Path:
    """A Flower app's folder, from our examples."""
    return Path(shutil.copytree(Path(__file__).parents[2] / "examples/flower-quickstart-numpy", cwd / "app"))


# What follows the command's name; the working directory is new and empty each time.
Call = Callable[[Place, Path], list[object]]

OPERATORS: dict[str, Call] = {
    "admin status": lambda p, _: p.operator,
    "admin versions": lambda p, _: p.operator,
    "admin pause": lambda p, _: p.operator,
    "admin resume": lambda p, _: p.operator,
    "admin clients": lambda p, _: ["--limit", 5, *p.operator],
    "admin tag": lambda p, _: ["device-1", "--add", "eu", *p.operator],
    "admin quarantine": lambda p, _: ["device-9", "--why", "a test", *p.operator],
    "admin release": lambda p, _: ["device-9", *p.operator],
    "admin rollback": lambda p, _: ["--to", 2, "--without", "device-1", *p.operator],
    "admin set": lambda p, _: ["server.lease_s=50", "run.rejections_max=90", *p.operator],
    "admin jobs list": lambda p, _: p.operator,
    "admin export": lambda p, _: ["out.safetensors", *p.operator],
    "admin watch": lambda p, _: ["--after", 1, *p.operator],
}
SERVERS: dict[str, Call] = {
    "health": lambda p, _: [p.server, *p.papers],
    "evaluate": lambda p, _: ["synthetic", "--server", p.server, "--once", *p.operator],
    "client": lambda p, cwd: ["synthetic", *p.device(f"a{cwd.name}"[:60]), "--tasks-max", 1],
}
OTHERS: dict[str, Call] = {
    "admin ca init": lambda p, _: ["--folder", "new"],
    "admin ca show": lambda p, _: ["--folder", p.ca],
    "admin ca copy": lambda p, _: ["copied", "--folder", p.ca],
    "admin ca restored": lambda p, cwd: ["--folder", shutil.copytree(p.ca, cwd / "copy")],
    "admin enrol": lambda p, _: ["device-5", "--folder", p.ca],
    "admin invitations": lambda p, _: ["--folder", p.ca, "--withdraw", enrolled(p)],
    "admin operator": lambda p, _: ["bob", "--folder", p.ca],
    "admin revoke": lambda p, cwd: [enrolled(p), "--folder", p.ca],
    "admin members": lambda p, cwd: ["--folder", with_member(p, cwd)],
    "admin attest-restore": lambda p, cwd: [
        *("--folder", p.ca, "--data-dir", shutil.copytree(p.folder / "stopped", cwd / "data")),
    ],
    "admin backup": lambda p, _: ["backup", "--data-dir", p.folder / "data"],
    "admin restore": lambda p, cwd: [backed_up(p, cwd), "--data-dir", "new", "--folder", p.ca],
    "admin rebuild": lambda p, cwd: ["--data-dir", without_database(p, cwd)],
    "admin jobs add": lambda p, _: ["wards", p.folder / "run.toml", "--model", p.folder / "model"],
    "admin jobs stop": lambda p, cwd: [with_job(p, cwd), "--folder", "jobs"],
    "admin jobs start": lambda p, cwd: [with_job(p, cwd), "--folder", "jobs"],
    "keeper init": lambda p, _: ["--ca", p.ca / "ca.pem"],
    "keeper show": lambda p, cwd: ["--folder", kept(p, cwd)],
    "keeper serve": lambda p, cwd: ["--folder", kept(p, cwd), "--listen", "127.0.0.1:0"],
    "bundle key": lambda p, _: ["--out", "signer.key"],
    "bundle make": lambda p, cwd: [own_app(cwd), "--key", signer_key(cwd), "--out", "app.bundle"],
    "bundle show": lambda p, cwd: [bundled(cwd)],
    "config show": lambda p, _: [p.folder / "run.toml"],
    "demo": lambda p, _: ["--workload", "synthetic", "--clients", 1, "--set", "run.updates_max=4"],
    "check": lambda p, _: ["synthetic"],
    "init": lambda p, _: ["synthetic"],
    "new": lambda p, _: ["mine"],
    "simulate": lambda p, _: [p.folder / "run.toml", *SMALL, "--out", "run"],
    "tune": lambda p, _: [
        *(p.folder / "run.toml", *SMALL, "--no-defaults", "--range", "client.learning_rate=0.1,0.2"),
        *("--trials", 2, "--seeds", 1, "--fresh-seeds", 2, "--extensions", 0, "--out", "tuned"),
    ],
    "search": lambda p, _: [p.folder / "run.toml", "--updates", 4, "--warm-up-updates", 4, "--out", "found"],
    "calibrate": lambda p, _: [p.folder / "run", "--out", "fleet.toml", "--foretell"],
    "trace": lambda p, _: ["phones.csv", "--synthetic", 3],
    "compare": lambda p, _: [p.folder / "run", "--out", "compare.html"],
    "report": lambda p, cwd: [shutil.copytree(p.folder / "run", cwd / "run")],
    "replay": lambda p, _: [p.folder / "run"],
    "verify": lambda p, _: [p.folder / "stopped"],
    "ui": lambda p, _: [p.folder / "run", "--listen", "127.0.0.1:0"],
    "flower pack": lambda p, cwd: [flower_app(cwd), "--out", "packed", "--set", "run.updates_max=4"],
    "server": lambda p, _: [
        *("--model", p.folder / "model", "--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"),
    ],
}
COMMANDS = {**OPERATORS, **SERVERS, **OTHERS}
OF_MASKED_SUMS = {"admin secagg drop"}  # typed where there are some: tests/crash/test_masked_fleet.py
OF_KEEPERS = {"keeper health"}  # typed where one serves: tests/security/test_keeper.py
ENDLESS = ("server", "ui", "admin watch", "keeper serve")  # until they are told to stop
# One for each module of commands, and for each that imports more when it runs.
STARTED = (
    *(
        "admin backup",
        "admin restore",
        "admin status",
        "bundle make",
        "calibrate",
        "check",
        "flower pack",
        "keeper init",
        "replay",
        "report",
        "search",
        "trace",
        "tune",
        "verify",
    ),
)
STARTED_WITH_SLOW = {*STARTED} - {"admin status", "bundle make", "check", "keeper init", "report", "tune"}
APART = ("client", "demo")  # in a process of their own: they handle signals, and start others


def backed_up(at: Place, cwd: Path) -> Path:
    """A backup of a server's data."""
    answer(anabranch(at.folder, "admin", "backup", cwd / "copy", "--data-dir", "stopped", "--json"))
    return cwd / "copy"


def without_database(at: Place, cwd: Path) -> Path:
    """A server's data that have lost their database."""
    data = Path(shutil.copytree(at.folder / "stopped", cwd / "data"))
    for database in data.glob("anabranch.db*"):
        database.unlink()
    return data


def own_app(cwd: Path) -> str:
    """An App in a file."""
    (cwd / "mine.py").write_text("class Mine:\n    def model(self): ...\n    def data(self, shard): ...\n")
    return f"{cwd}/mine.py:Mine"


def signer_key(cwd: Path) -> Path:
    """A key to sign bundles with."""
    answer(anabranch(cwd, "bundle", "key", "--out", "a.key", "--json"))
    return cwd / "a.key"


def bundled(cwd: Path) -> Path:
    """A bundle of that App."""
    answer(anabranch(cwd, "bundle", "make", own_app(cwd), "--key", signer_key(cwd), "--json"))
    return cwd / "app.bundle"


def kept(at: Place, cwd: Path) -> Path:
    """The folder of a keeper."""
    answer(anabranch(cwd, "keeper", "init", "--ca", at.ca / "ca.pem", "--folder", "mine", "--json"))
    return cwd / "mine"


def with_job(at: Place, cwd: Path) -> str:
    """The name of a job, in a folder `jobs`."""
    given = ("wards", "--model", at.folder / "model", "--folder", cwd / "jobs")
    return str(answer(anabranch(cwd, "admin", "jobs", "add", *given, "--json"))["job"])


def with_member(at: Place, cwd: Path) -> Path:
    """The authority's folder, once a device has joined."""
    with Authority.open(at.ca) as authority:
        issued(authority, Kind.DEVICE, f"member-of-{cwd.name}"[:60], cwd / "member")
    return at.ca


def enrolled(at: Place) -> str:
    """The name of a device that has a token."""
    answer(anabranch(at.folder, "admin", "enrol", "device-6", "--json"))
    return "device-6"


def listed(command: Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Command]]:
    """Every command below a group, by what is typed."""
    if not isinstance(command, Group):
        yield " ".join(path), command
        return
    for name, below in command.commands.items():
        yield from listed(below, (*path, name))


LISTED = dict(listed(command_line()))


def test_the_table_has_every_command() -> None:
    assert set(COMMANDS) | OF_MASKED_SUMS | OF_KEEPERS == set(LISTED)


def test_every_command_of_operators_takes_the_same_options() -> None:
    connected = {name for name, c in LISTED.items() if "--admin" in options(c) and name.startswith("admin ")}
    assert connected == set(OPERATORS) | OF_MASKED_SUMS
    for name in connected:
        assert {"--admin", "--identity", "--insecure", "--json"} <= options(LISTED[name]), name
    assert [name for name, c in LISTED.items() if "--json" not in options(c)] == []


@pytest.mark.parametrize("name", LISTED)
def test_each_argument_and_option_has_its_help(name: str) -> None:
    """A release of typer beside a later one of click had none of any argument."""
    shown = [parameter for parameter in LISTED[name].params if not getattr(parameter, "hidden", False)]
    assert [p.name for p in shown if p.name != "help" and not getattr(p, "help", None)] == []


@pytest.mark.parametrize("name", LISTED)
def test_its_help_says_all_that_was_written(name: str) -> None:
    """A word in brackets is a style to rich, and is not printed."""
    command = LISTED[name]
    usage = command.get_usage(Context(command, info_name=name))  # printed with whatever is typed wrongly
    of_options = (getattr(parameter, "help", None) for parameter in command.params)
    for text in filter(None, [command.help, usage, *of_options]):
        assert Text.from_markup(text).plain == text


def options(command: Command) -> set[str]:
    """The options that a command takes."""
    return {option for parameter in command.params for option in parameter.opts}


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str


Run = Callable[[str, list[object]], Said]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder, in this process where that is all the same."""
    monkeypatch.chdir(tmp_path)

    def called(name: str, arguments: list[object]) -> Said:
        words = [*name.split(), *map(str, arguments)]
        if name in ENDLESS:
            return ended(words, tmp_path)
        if name in APART:
            done = anabranch(tmp_path, *words)
            return Said(done.returncode, done.stdout, done.stderr)
        monkeypatch.setattr(sys, "argv", ["anabranch", *words])
        capfd.readouterr()
        with loggers_put_back(), stdout_put_back(), pytest.raises(SystemExit) as ending:
            main()
        out, err = capfd.readouterr()
        return Said(int(ending.value.code or 0), out, err)

    return called


def ended(words: list[str], cwd: Path) -> Said:
    """What a command that does not end by itself says first; then it is stopped as its user stops it."""
    with Process(COMMAND, *words, cwd=cwd, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=600)
    code = 0 if process.wait() == 130 else process.wait()  # Ctrl-C is no failure here
    return Said(code, first + rest, err)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", [*OPERATORS, *SERVERS])
@pytest.mark.parametrize("kind", ["plain", "guarded"])
def test_it_runs_on_a_server(
    kind: str, name: str, as_json: bool, run: Run, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(run, name, COMMANDS[name](request.getfixturevalue(kind), tmp_path), as_json)


# The demo's lines for programs are those of test_demo, which has begun it as a person does too.
@pytest.mark.parametrize(
    ("name", "as_json"),
    [
        pytest.param(n, j, marks=pytest.mark.slow if n == "demo" else ())
        for n in OTHERS
        for j in (False, True)
        if (n, j) != ("demo", True)
    ],
)
def test_it_runs_without_one(name: str, as_json: bool, run: Run, tmp_path: Path, plain: Place) -> None:
    check(run, name, COMMANDS[name](plain, tmp_path), as_json)


def check(run: Run, name: str, arguments: list[object], as_json: bool) -> None:
    """It ends well, and says something that its reader can read."""
    said = run(name, [*arguments, *["--json"][: int(as_json)]])
    assert said.code == 0, said.err
    assert "Traceback" not in said.err
    lines = said.out.splitlines()
    assert lines, "it says something"
    if as_json:
        assert all(isinstance(json.loads(line), dict) for line in lines)
    else:
        assert not [line for line in lines if line.startswith("{")]


@pytest.mark.parametrize("name", in_slices(STARTED, (), STARTED_WITH_SLOW))
def test_it_imports_what_it_needs(name: str, tmp_path: Path, plain: Place) -> None:
    """In an interpreter of its own. Others are started so by test_demo, and by test_commands."""
    done = started(tmp_path, *name.split(), *COMMANDS[name](plain, tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*OPERATORS, "evaluate"])
def test_it_does_not_speak_in_the_clear_by_itself(
    name: str, run: Run, tmp_path: Path, plain: Place, guarded: Place
) -> None:
    elsewhere = Place(plain.folder, plain.server, ELSEWHERE, (), ())
    away = run(name, COMMANDS[name](elsewhere, tmp_path))
    assert away.code == OUTCOMES[ConfigError].exit_code
    assert f"{ELSEWHERE} is another machine" in away.err
    nameless = Place(guarded.folder, guarded.server, guarded.admin, (), ())
    refused = run(name, COMMANDS[name](nameless, tmp_path))
    assert refused.code == OUTCOMES[NotAuthenticated].exit_code
    assert "--identity" in refused.err


def test_a_follower_is_on_the_machine_of_its_operators(run: Run) -> None:
    """It waited for 127.0.0.1, whatever `--admin` said."""
    away = run("evaluate", ["synthetic", "--once", "--admin", "[fd00::1]:9001/wards"])
    assert away.code == OUTCOMES[ConfigError].exit_code
    assert "[fd00::1]:7070/wards is another machine" in away.err
    assert "following [fd00::1]:7070/wards; --server HOST:PORT names another" in away.err
