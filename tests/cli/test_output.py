"""What commands print for programs is JSON, whatever the figures are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.cli.output import Output


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
