"""The scripts of the examples become devices by a few lines, as a person would start them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import anabranch, answer

import anabranch as ab
from scripts import EXAMPLES, changed, losses

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

MODELS = {"transformers": "make_model", "lightning": "Digits"}


@pytest.mark.parametrize("library", MODELS)
def test_a_script_is_a_device_by_three_lines(library: str, tmp_path: Path) -> None:
    names = f"plain_{library}.py", f"joined_{library}.py"
    assert len(lines := changed(*names)) == 3, lines
    model = f"{EXAMPLES / names[0]}:{MODELS[library]}"
    answer(anabranch(tmp_path, "init", model, "--json"))  # what the page has its reader type
    with ab.Server(model, strategy="fedasync", until=ab.Until(updates=3)) as server:
        start = server.weights()
        assert len(losses(names[1], server.address, tmp_path)) == 1
        status, final = server.status(), server.weights()
    assert (status.version, status.updates_applied) == (3, 3)
    assert any((start[name] != final[name]).any() for name in start)
