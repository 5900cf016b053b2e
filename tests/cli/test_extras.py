"""A module that is not installed is named with the extra that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from anabranch.core.config.extras import EXTRAS, how_to_install

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["anabranch", *{arguments!r}]
from anabranch.cli.main import main
main()
"""
DISTRIBUTIONS = {  # of what is imported by another name
    "cryptography.hazmat.primitives.hpke": "cryptography",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "sklearn": "scikit-learn",
}


SHORT = ["simulate", "--set", "run.workload=synthetic", "--set", "run.updates_max=2"]


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["server"], 2),
        (SHORT, 0),
        ([*SHORT, "--executor", "ray"], 2),
        (["simulate", "--flower", str(ROOT / "examples" / "flower-quickstart-numpy")], 2),
        (["init", "digits"], 3),
        (["verify", "."], 2),
    ],
)
def test_commands_without_any_extra(arguments: list[str], exit_code: int, tmp_path: Path) -> None:
    code = WITHOUT.format(modules=set(EXTRAS), arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == exit_code, done.stderr
    if exit_code:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: "), line
        assert 'pip install "anabranch[' in line


@pytest.mark.parametrize(
    ("absent", "command", "extra"),
    [
        ("sklearn", ["simulate", "digits", "--updates", "2"], "workloads"),
        ("torch", ["simulate", "digits", "--updates", "2"], "client"),
        ("torch", ["init", "digits"], "client"),
        ("sqlalchemy", ["server"], "server"),
    ],
)
def test_what_is_missing_is_named_with_its_own_extra(
    absent: str, command: list[str], extra: str, tmp_path: Path
) -> None:
    code = WITHOUT.format(modules={absent}, arguments=command)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode in (2, 3)
    assert line.startswith("error: ")
    assert re.findall(r"pip install .*", line) == [f'pip install "anabranch[{extra}]"']


def test_the_table_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: " ".join(needs).replace("[binary]", "") for extra, needs in extras.items()}
    for module, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(module, module) in named[extra], module
    assert set(EXTRAS.values()) == set(extras) - {"all", "dev", "docs", "keeper", "libraries"}


def test_what_lies_in_a_module_is_of_its_extra() -> None:
    assert how_to_install("sqlalchemy.orm") == 'pip install "anabranch[server]"'
    hpke = "cryptography.hazmat.primitives.hpke"
    assert how_to_install(hpke) == 'pip install "anabranch[secagg]"'
    assert not how_to_install("cryptography.x509")
    assert how_to_install("statsmodels") == how_to_install(None) == ""
