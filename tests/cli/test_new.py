"""`anabranch new`: a folder that runs and tests itself. The pytorch one is walked by the page of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from build_context import copy_context
from commands import anabranch, answer
from guarded import issued

from anabranch.cli.creating import TEMPLATES
from anabranch.client.state import state_dir_of
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.wallet import joining_key

LARGE = ("transformers", "lightning")  # walked in tests/libraries


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_files_are_whole(template: str, tmp_path: Path) -> None:
    told = answer(anabranch(tmp_path, "new", "my-own", "--template", template, "--json"))
    files = {path.name: path.read_text() for path in (tmp_path / "my-own").iterdir()}
    assert sorted(files) == told["files"]
    assert {"README.md", "run.toml", "test_app.py", "Dockerfile", ".gitignore", ".dockerignore"} < set(files)
    for name, text in files.items():
        assert not re.search(r"@[A-Z]+@", text), name
        assert max(map(len, text.splitlines())) <= 132, name
        if name.endswith(".py"):
            assert ast.get_docstring(ast.parse(text)), name
    assert 'name = "my-own"' in files["run.toml"]
    assert (template in LARGE) == ("train.py" in files)


def used(folder: Path) -> None:
    """A generated folder after the commands of its README, and of what they lead to."""
    for words in (
        ("init", "app.py:App", "--out", "model"),
        ("admin", "ca", "init"),
        ("admin", "operator", "me", "--out", "me"),
        ("admin", "operator", "you", "--out", "papers/you"),  # a name that no list can know
        ("admin", "ca", "copy", "kept"),
        ("admin", "enrol", "ward", "--count", "2", "--out", "tokens.csv"),
        ("simulate", "run.toml", "--updates", "2"),
    ):
        answer(anabranch(folder, *words, "--json"))
    authority = Authority.open(folder / "anabranch-identity")
    for name in ("device-1", "device-2"):
        issued(authority, Kind.DEVICE, name, folder / state_dir_of(name))
    joining_key(folder / "device-3")
    (folder / "device-4.token").write_text(authority.invite("device-4", 60.0))


def secrets(folder: Path) -> list[str]:
    """The files in which a private key or a token is, by their content."""
    tokens = (folder / "tokens.csv").read_text().split("\n")[1].split(",")[1], "PRIVATE KEY"
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return sorted(
        str(path.relative_to(folder))
        for path, text in texts.items()
        if any(token.encode() in text for token in tokens) or path.suffix == ".token"
    )


def test_no_key_gets_into_an_image_or_into_git(tmp_path: Path) -> None:
    """By Docker's rules of what `COPY .` takes, and by git's own word."""
    answer(anabranch(tmp_path, "new", "mine", "--template", "numpy", "--json"))
    folder = tmp_path / "mine"
    made = {path.name for path in folder.iterdir()}
    used(folder)
    hidden = secrets(folder)
    assert len(hidden) == 9, hidden
    copy_context(folder, tmp_path / "context")
    sent = {str(path.relative_to(tmp_path / "context")) for path in (tmp_path / "context").rglob("*")}
    assert not sent & set(hidden)
    assert {path.split("/")[0] for path in sent} == made | {"kept", "papers", "device-3", "model"}

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    kept = set(git("ls-files", "--others", "--exclude-standard").splitlines())
    assert not kept & set(hidden)
    assert {path.split("/")[0] for path in kept} == made | {"kept"}  # the certificate


@pytest.mark.parametrize(
    ("template", "extras"),
    [("pytorch", None), ("numpy", None), ("lightning", "lightning"), ("flower", "flower")],
)
def test_an_image_has_what_its_devices_import(template: str, extras: str | None, tmp_path: Path) -> None:
    """And devices start where they may write: in the volume of the image that theirs is made of."""
    answer(anabranch(tmp_path, "new", "mine", "--template", template, "--json"))
    lines = (tmp_path / "mine" / "Dockerfile").read_text().splitlines()
    steps = [line.split()[0] for line in lines if line and not line.startswith("#")]
    if extras is None:
        assert steps == ["FROM", "COPY"]
    else:
        assert steps == ["FROM", "USER", "RUN", "USER", "COPY"]
        assert f'"anabranch[{extras}]"' in "".join(lines)
        assert "USER 10001:10001" in lines
    app = "flower:/app" if template == "flower" else f"/app/{TEMPLATES[template].app}"
    assert f"my-device {app} --server" in (tmp_path / "mine" / "README.md").read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_until_a_release_it_is_installed_from_a_clone(template: str, tmp_path: Path) -> None:
    """pip finds none; by the changelog's own word."""
    root = Path(__file__).parents[2]
    assert "No release was made yet" in (root / "CHANGELOG.md").read_text(), "then the pages say so otherwise"
    answer(anabranch(tmp_path, "new", "mine", "--template", template, "--json"))
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = {
        "README.md": (tmp_path / "mine" / "README.md").read_text(),
        "installing.md": (root / "docs" / "installing.md").read_text(),
        "new.md": (root / "docs" / "new.md").read_text(),
    }
    for name, page in pages.items():
        found = re.findall(r'pip install "([a-z.]+)\[([a-z,]+)\]"', page)
        first = min(i for i, (where, _) in enumerate(found) if where == ".")
        assert first <= 1, f"{name}: it is the line beside the first"
        assert {extra for _, extras in found for extra in extras.split(",")} <= set(known), name
        assert found[first][1] == found[1 - first][1], name


@pytest.mark.parametrize("template", ["numpy", pytest.param("flower", marks=pytest.mark.slow)])
def test_it_runs_and_its_tests_pass(template: str, tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "new", "mine", "--template", template, "--json"))
    folder = tmp_path / "mine"
    simulated = anabranch(folder, "simulate", "run.toml", "--updates", 20, "--json")
    assert answer(simulated)["updates_applied"] == 20
    assert "changes nothing" not in simulated.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


REGRESSION = """
import numpy as np
import anabranch as ab

class App(ab.App):
    def model(self):
        return {"w": np.zeros(3)}

    def data(self, shard):
        x = np.random.default_rng(0).normal(size=(60, 3))
        return ab.Examples(x, x @ np.loadtxt(self.data_path))

    def train(self, model, examples, plan, seed):
        error = examples.x @ model["w"] - examples.y
        model["w"] -= plan.learning_rate * examples.x.T @ error / len(error)

    def evaluate(self, model, examples):
        error = examples.x @ model["w"] - examples.y
        return {"r2": 1 - (error**2).sum() / ((examples.y - examples.y.mean()) ** 2).sum()}
"""


def test_its_tests_are_of_another_app_as_well(tmp_path: Path) -> None:
    """One with a metric of its own, and data that lie where `run.toml` says."""
    answer(anabranch(tmp_path, "new", "mine", "--template", "numpy", "--json"))
    folder = tmp_path / "mine"
    (folder / "app.py").write_text(REGRESSION)
    (tmp_path / "weights.txt").write_text("1 2 3")
    own = f'metric = "r2"\nmode = "max"\ndata_path = {str(tmp_path / "weights.txt")!r}'
    settings = re.sub(r"target_accuracy.*", own, (folder / "run.toml").read_text())
    (folder / "run.toml").write_text(settings)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    (folder / "run.toml").write_text(settings.replace("weights.txt", "nowhere.txt"))
    path = ("--data-path", tmp_path / "weights.txt")
    simulated = anabranch(folder, "simulate", "run.toml", "--updates", 4, *path, "--json")
    assert answer(simulated)["updates_applied"] == 4


@pytest.mark.parametrize("name", ["mine", "my_own", "a_folder_with_a_name-that_is_too_-long", "M"])
def test_flower_takes_the_name_of_its_app(name: str, tmp_path: Path) -> None:
    """By its own rule: a folder may have more names than an app that `flwr run` is to take."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")
    from flwr.supercore.utils import is_valid_name

    answer(anabranch(tmp_path, "new", name, "--template", "flower", "--json"))
    told = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())
    for called in (told["project"]["name"], told["tool"]["flwr"]["app"]["publisher"]):
        assert is_valid_name(called) == (True, ""), called
        assert name.replace("_", "-").startswith(called)
        assert called[-1] != "-"
    assert tomllib.loads((tmp_path / name / "run.toml").read_text())["run"]["name"] == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "--template", "keras"], "take one of pytorch, transformers"),
        (["9mine"], "begins with a letter"),
        (["gerät"], "'gerät', which has 'ä': a name has ASCII letters"),
        (["my runs"], "'my runs', which has ' '"),
        (["full"], "is there and not empty"),
        (["file"], "is there and not empty"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    done = anabranch(tmp_path, "new", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]
