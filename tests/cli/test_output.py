"""What commands print for programs is JSON, whatever the figures are."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch

from anabranch.cli import output as output_module
from anabranch.cli.output import Output, Ticker


def test_a_figure_that_is_none_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = float("nan"), 0.5
    Output(True).event("evaluated", loss=bad, more={"list": [float("inf"), good], "path": Path("a")}, n=1)
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "kind": "evaluated",
        "loss": None,
        "more": {"list": [None, good], "path": "a"},
        "n": 1,
    }


NOISY = """
import os, sys
import numpy as np
import anabranch

print("module")

class Mine(anabranch.App):
    def model(self):
        print("model")
        return {"w": np.zeros(3)}

    def data(self, shard):
        sys.stdout.write("data\\n")
        return np.ones((40, 3)), np.ones(40)

    def train(self, model, examples, plan, seed):
        os.write(1, b"train\\n")  # as a library that is no Python
        model["w"] += 1.0

    def evaluate(self, model, examples):
        os.system("echo evaluate")
        return {"loss": float(model["w"].sum())}
"""
SHORT = ["--clients", 2, "--updates", 3]
PRINTING = {
    "check": [],
    "init": [],
    "simulate": SHORT,
    "simulate in workers": [*SHORT, "--workers", 2],
    "simulate in parallel": [*SHORT, "--seeds", "0..1", "--parallel", 2],
}


@pytest.mark.parametrize("command", PRINTING)
def test_what_parts_print_is_not_among_the_answers_for_programs(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NOISY)
    done = anabranch(tmp_path, command.split()[0], "mine.py:Mine", *PRINTING[command], "--json")
    assert done.returncode == 0, done.stderr
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines()), done.stdout
    said = {"module", "model"} if command == "init" else {"module", "model", "data", "train", "evaluate"}
    assert said <= set(done.stderr.splitlines())


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_closed_terminal_does_not_take_goes_nowhere(as_json: bool) -> None:
    """Who writes has still to end in order: a device has its work to put away."""
    code = (
        "import sys; from anabranch.cli.output import Output, for_programs; "
        "output = Output(for_programs(sys.argv[1] == 'True')); "
        "output.event('first', 'first'); sys.stdin.readline(); "
        "[output.event(text, text) for text in ('second', 'third')]; sys.exit(7)"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, str(as_json)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while b"first" not in said:
        said += os.read(ours, 1024)
    os.close(ours)
    process.communicate(b"\n")
    assert process.returncode == 7, said


def test_work_shows_on_a_terminal_how_far_it_is_by_its_own_words() -> None:
    """As `verify` does of a folder, whose name is no markup."""
    code = (
        "import sys; from anabranch.cli.output import Output, Ticker\n"
        "with Ticker(Output()) as ticker:\n"
        "    ticker.show('data[/b]: replayed'); sys.stdin.readline()"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    while b"data[/b]: replayed" not in said:
        assert b"Traceback" not in said, said
        said += os.read(ours, 1024)
    process.communicate(b"\n")
    os.close(ours)
    assert process.returncode == 0


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_who_serves_goes_on_when_nobody_reads_any_more(as_json: bool, serves: bool) -> None:
    """`anabranch server | grep -m1 serving`: its run may end long after, and it serves on."""
    code = (
        "import sys; from anabranch.cli.output import Output, for_programs; "
        "as_json, serves = (word == '1' for word in sys.argv[1:]); "
        "output = Output(for_programs(as_json), serves); "
        "output.event('first', 'first'); sys.stdin.readline(); "
        "[output.event(text, text) for text in ('second', 'third')]; sys.exit(7)"
    )
    command = [sys.executable, "-c", code, str(int(as_json)), str(int(serves))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(len("first"))
    process.stdout.close()
    process.stdout = None
    process.communicate(b"\n", timeout=600)
    assert (process.returncode == 7) is serves


@pytest.mark.parametrize("as_json", [False, True])
def test_who_serves_goes_on_where_the_disk_of_its_log_is_full(as_json: bool, tmp_path: Path) -> None:
    """What finds no room is lost; a later line is not, nor is it said twice."""
    code = (
        "import os, sys; from anabranch.cli.output import STDOUT, Output, descriptor, for_programs; "
        "output = Output(for_programs(sys.argv[1] == 'True'), serves=True); output.event('first', 'first'); "
        "at = descriptor(STDOUT); kept = os.dup(at); os.dup2(os.open('/dev/full', os.O_WRONLY), at); "
        "[output.event(text, text) for text in ('second', 'third')]; "
        "os.dup2(kept, at); output.event('fourth', 'fourth'); sys.exit(7)"
    )
    command = [sys.executable, "-c", code, str(as_json)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (7, "")
    assert [json.loads(line)["kind"] if as_json else line for line in done.stdout.splitlines()] == [
        "first",
        "fourth",
    ]


def test_who_serves_goes_on_when_nobody_reads_its_warnings_any_more() -> None:
    """And what is told on stdout has its reader still."""
    code = (
        "import sys; from anabranch.cli.output import Output; output = Output(True, serves=True); "
        "output.warn('first'); sys.stdin.readline(); output.warn('second'); output.warn('third'); "
        "output.event('told'); sys.exit(7)"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.read(len("first"))
    process.stderr.close()
    process.stderr = None
    told, _ = process.communicate(b"\n", timeout=600)
    assert (process.returncode, json.loads(told)["kind"]) == (7, "told")


@pytest.mark.parametrize("as_json", [False, True])
def test_work_goes_on_when_nobody_reads_its_progress_any_more(as_json: bool) -> None:
    code = (
        "import sys, threading; from anabranch.cli.output import Output, Ticker; "
        "ticker = Ticker(Output(sys.argv[1] == 'True')); ticker.show('first', it='first'); "
        "sys.stdin.readline(); ticker.show('second', it='second'); "
        "[each.join() for each in threading.enumerate() if each.name == 'anabranch-ticker']; sys.exit(7)"
    )
    command = [sys.executable, "-c", code, str(as_json)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert b"first" in process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, told = process.communicate(b"\n", timeout=600)
    assert (process.returncode, told) == (7, b"")


def test_an_answer_that_nobody_reads_ends_without_a_word_of_the_interpreter(tmp_path: Path) -> None:
    """As `| true` reads none: what is left in the file of answers is nobody's error."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-X", "dev", "-m", "anabranch.cli.main", "init", "synthetic", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=600)
    os.close(write)
    assert "Exception ignored" not in done.stderr, done.stderr
    assert "unclosed file" not in done.stderr, done.stderr
    assert (tmp_path / "anabranch-model").is_dir()


def test_short_work_that_is_patient_shows_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "PLAIN_EVERY_S", 3600.0)
    with Ticker(Output(), patient=True) as ticker:
        ticker.show("at work")
    assert capsys.readouterr().out == ""
    with Ticker(Output()) as ticker:
        ticker.show("at work")
    assert capsys.readouterr().out == "at work\n"


def test_long_work_that_is_patient_shows_how_far_it_is(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "PLAIN_EVERY_S", 0.01)
    said = ""
    with Ticker(Output(), patient=True) as ticker:
        ticker.show("at work")
        while not said:
            said = capfd.readouterr().out
    assert said.startswith("at work\n")


def test_a_narrow_terminal_breaks_no_word_of_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ["client", "taken", "rejected", "flaws", "shortened", "quarantine", "last seen", "behind"]
    why = "sent 10 updates in a row that cannot be used"
    row = ["greenhouse-device-17", "1", "2", "3", "4", why, "2026-11-22 01:09:23 UTC", "1,234"]
    Output().table("", columns, [row])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    shown = said.split()
    for word in (*columns[:6], *row[0].split(), *why.split(), "2026-11-22", "01:09:23"):
        assert word in shown, word


def test_a_table_wider_than_the_terminal_goes_on_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ["strategy", *(f"measurement-{n}" for n in range(9))]
    rows = [[name, *(f"{name}-{n}" for n in range(9))] for name in ("fedbuff", "annealed")]
    Output().table("two runs", columns, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = [[word for word in line.split() if word not in "┃│"] for line in lines]
    assert words.count(["two", "runs"]) == 1
    for row in (columns, *rows):
        mine = [line[1:] for line in words if line[:1] == row[:1]]
        assert len(mine) == 2
        assert [word for line in mine for word in line] == row[1:]


def test_columns_of_unequal_words_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ["strategy", "seeds", "final accuracy", "final loss", "worst tenth of groups", "time to target"]
    columns += ["updates", "uplink", "downlink"]
    row = ["fedbuff, local_steps=3, simulated", "2", "67.20 % ± 0.21 %", "1.06 ± 0.00351", "45.23 % ± 2.2 %"]
    row += ["1.2 min ± 3.2 s", "60", "240 kB ± 2 kB", "269 kB"]
    Output().table("", columns, [row])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(lines).split()
    for word in " ".join((*columns, *row)).split():
        assert word in shown


def test_a_name_between_colons_is_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.table("app.py:A: mean", ["run"], [["app.py:A: it"]])
    output.say("app.py:A: said")
    output.warn("app.py:A: warned")
    printed = capsys.readouterr()
    assert [printed.out.count("app.py:A:"), printed.err.count("app.py:A:")] == [3, 1]


def test_what_the_encoding_of_stdout_lacks_is_written_by_its_number() -> None:
    program = (
        "from anabranch.cli.main import _open_streams as opened; opened(); print('0.1', chr(177), '0.2')"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert (done.stdout, done.stderr) == ("0.1 \\xb1 0.2\n", "")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", ["Figures +/- deviation", "a... \\u017b", "0.5 +/- 0.1", "c", "-"]),
        ("latin-1", ["Figures ± deviation", "a... \\u017b", "0.5 ± 0.1", "c", "-"]),
        ("utf-8", ["Figures ± deviation", "a… Ż", "0.5 ± 0.1", "c", "\N{EN DASH}"]),
    ],
)
def test_signs_that_an_encoding_lacks_are_written_out(encoding: str, shown: list[str]) -> None:
    """And a table's lines stay of one length: in the C locale of a small image, in a service's log."""
    code = (
        "from anabranch.cli.output import Output; "
        "rows = [['a… Ż', '0.5 ± 0.1'], ['c', '\\N{EN DASH}']]; "
        "Output().table('Figures ± deviation', ['name', 'value'], rows)"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    title, *lines = done.stdout.decode(encoding).splitlines()
    cells = [cell.strip() for line in lines for cell in re.split("[|│]", line)]
    assert [title.strip(), *(cell for cell in cells if cell in shown)] == shown
    assert len({len(line) for line in lines}) == 1, lines
