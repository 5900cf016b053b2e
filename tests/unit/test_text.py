"""What came from elsewhere moves no cursor, ends no line and turns no text round."""

from __future__ import annotations

import io
import logging

import pytest
from left import loggers_put_back
from rich.console import Console

from anabranch.cli.logs import set_up_logging
from anabranch.cli.output import Output
from anabranch.core.text import LAYOUT, visible

HOSTILE = "run\x1b[2J\x07\r\nERROR\x9b31m \u202egnp.exe\u2028\ud800 Größe 🙂"
SHOWN = r"run\x1b[2J\x07\r\nERROR\x9b31m \u202egnp.exe\u2028\ud800 Größe 🙂"
LINES = SHOWN.replace(r"\n", "\n")


def test_control_characters_are_escaped() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible(SHOWN) == SHOWN
    assert visible("two\nlines\t\x1b", LAYOUT) == "two\nlines\t" + r"\x1b"


def test_commands_print_them_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    output, printed = Output(), io.StringIO()
    output.console = Console(file=printed, width=400)
    output.say(HOSTILE)
    output.table(HOSTILE, ["a"], [[HOSTILE]])
    output.warn(HOSTILE)
    assert printed.getvalue().startswith(LINES)
    assert SHOWN.split(" ")[0] in printed.getvalue()  # a title is no line break, but may be folded
    assert LINES in capsys.readouterr().err
    assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028"} & set(printed.getvalue())


def test_so_do_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: made.extend(given["handlers"]))
    with loggers_put_back():
        set_up_logging(as_json=False)
    (handler,) = made
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "serving %s", (HOSTILE,), None)
    assert handler.filter(record)
    assert record.getMessage() == f"serving {LINES}"
    assert handler.format(record).splitlines()[1:] == ["  " + LINES.splitlines()[1]], (
        "at the margin none is forged"
    )
