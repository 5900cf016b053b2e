"""Parts of others: how they are found, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import own_parts
import pytest
from own_parts import ALL, Own, install

from anabranch.compress import registry
from anabranch.compress.stage import ValuesStage
from anabranch.core import parts
from anabranch.core.config.tables import merge
from anabranch.core.errors import AppError, ConfigError, UnknownCodec
from anabranch.core.parts import PartKind, is_code, told_name
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.robust.registry import RULES
from anabranch.strategies.schedulers.registry import SCHEDULERS
from anabranch.strategies.submodels.registry import PLANNERS
from anabranch.support.code import check_trusted, let_in, let_in_one, source_digests
from anabranch.support.own_parts import own_parts as own_parts_of

FIND = """
import json, own_parts
found = {part.kind.word: part.kind.find(part.name).__name__ for part in own_parts.ALL}
listed = {part.kind.word: part.name in part.kind.names() for part in own_parts.ALL}
print(json.dumps([found, listed]))
"""


@pytest.fixture(scope="module", autouse=True)
def let_in_for_these_tests() -> Iterator[None]:
    """No other test knows of these parts."""
    with own_parts.forgotten():
        yield


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("./my.py:Mine", True),
        ("/a folder/my.py:mine", True),
        ("my.module:Mine", True),
        ("fedbuff", False),
        ("postgresql://me:secret@host/db", False),
        ("memory", False),
        ("my.py", False),
        ("my.py:", False),
        ("my.py:1", False),
        ("127.0.0.1:7070", False),
    ],
)
def test_what_names_code(name: str, code: bool) -> None:
    assert is_code(name) is code


@pytest.mark.parametrize("own", ALL, ids=lambda own: own.kind.word)
def test_every_kind_is_let_in_by_path_and_then_has_its_own_name(own: Own) -> None:
    part = own.let_in()
    assert part.__name__ == own.cls
    assert own.kind.find(own.name) is part
    assert own.name in own.kind.names()
    assert told_name(own.place) == own.name, "what another machine is told"
    own.let_in()  # once more is no error


def test_what_is_built_in_bears_the_name_by_which_it_is_known() -> None:
    kinds = (STRATEGIES, SCHEDULERS, RULES, PLANNERS)
    assert {kind.word: {name: part.name for name, part in kind.ours().items()} for kind in kinds} == {
        kind.word: {name: name for name in kind.built_in} for kind in kinds
    }


def test_every_kind_is_found_by_its_entry_point(tmp_path: Path) -> None:
    path = os.pathsep.join([str(install(tmp_path / "site", *ALL)), str(Path(own_parts.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        env={**os.environ, "PYTHONPATH": path + os.pathsep + os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found, listed = json.loads(done.stdout)
    assert found == {own.kind.word: own.cls for own in ALL}
    assert all(listed.values())


def package(folder: Path, name: str, entries: str, text: str = "class Mine: name, turn = 'mine', 1") -> None:
    """An installed package `name` of one module, with these entry points for widgets."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    (about / "entry_points.txt").write_text(f"[anabranch.widgets]\n{entries}\n")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, which is on the import path."""
    folder = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    parts.installed.cache_clear()
    yield folder
    parts.installed.cache_clear()


def test_an_installed_part_that_has_the_name_of_a_built_in_one_is_no_secret(site: Path) -> None:
    package(site, "acme", "plain = acme:Mine")
    with pytest.raises(ConfigError, match=r"'plain' is built in, and of the installed package acme as well"):
        kind().check_name("plain")


def test_a_name_that_two_packages_bring_is_refused(site: Path) -> None:
    package(site, "acme", "mine = acme:Mine")
    assert kind().find("mine").turn == 1
    package(site, "other", "mine = other:Mine")
    parts.installed.cache_clear()
    with pytest.raises(ConfigError, match="'mine' is of several installed packages, acme and other"):
        kind().find("mine")


def test_an_entry_point_is_called_as_its_part_is(site: Path) -> None:
    """A stage's chain goes by the one name, what a device says it has by the other: it would send raw."""
    package(site, "acme", "yours = acme:Mine")
    with pytest.raises(ConfigError, match="'yours' of the installed package acme calls itself 'mine'"):
        kind().find("yours")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), r"^widget Mine\.turn \(.*acme\.py:5\): KeyError: 'speed'\n(?s:.*)acme\.py:5 in turn"),
        (
            (1, 2),
            r"^widget Mine\.turn .*: TypeError: Mine\.turn\(\) takes 1 positional argument but 3 were",
        ),
    ],
)
def test_what_an_installed_part_raises_is_told_with_its_lines(
    site: Path, given: tuple[int, ...], told: str
) -> None:
    package(
        site,
        "acme",
        "mine = acme:Mine",
        "class Mine:\n    name = 'mine'\n\n    def turn(self):\n        return {}['speed']\n",
    )
    widgets = kind()
    part = widgets.find("mine")()
    with pytest.raises(AppError, match=told), own_parts_of([widgets]):
        part.turn(*given)


def test_an_installed_part_that_is_broken_ends_only_what_needs_it(
    site: Path, stages: PartKind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package(site, "acme", "mine = acme:Mine", "raise RuntimeError('no licence')")
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text("[anabranch.stages]\nmine = acme:Mine\n")
    monkeypatch.setattr(stages, "_broken", set())
    monkeypatch.delitem(stages.__dict__, "_entries", raising=False)
    why = "codec stage 'mine' of the installed package acme cannot be loaded: RuntimeError: no licence"
    try:
        for _ in range(2):
            assert not any(stage.startswith("mine") for stage in registry.stages())
        assert [record.getMessage() for record in caplog.records] == [
            f"{why}; nothing that needs it will run"
        ]
        assert registry.make_codec("topk(0.1)|int8").text
        with pytest.raises(UnknownCodec, match=f"codec 'mine': {why}"):
            registry.make_codec("mine")
        with pytest.raises(ConfigError, match=why):
            stages.check_name("mine")
    finally:
        stages.__dict__.pop("_entries", None)


def kind() -> PartKind:
    return PartKind(
        "widget", "widgets", ("strategy.name",), {"plain": int}, ("turn", "name"), option="--part w=PATH"
    )


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", AppError, "own.py has no attribute 'Mine'"),
        ("class Mien: pass", AppError, "did you mean 'Mien'?"),
        ("class Mine: pass", ConfigError, "this widget needs a name of its own: write name = '...' in it"),
        ("class Mine: name = 'mine'", ConfigError, "is no widget: it lacks turn; see docs/extending.md"),
        (
            "class Mine: name, turn = 'plain', 1",
            ConfigError,
            "another widget 'plain' already: rename this one",
        ),
        (
            "class Mine:\n    name = 'mine'\n    async def turn(self): ...",
            ConfigError,
            "own.py:Mine: turn is `async def`, and nobody awaits it: write `def`",
        ),
        ("1 / 0", AppError, "it cannot be loaded"),
        (
            "import nowhere_to_be_found",
            AppError,
            "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(
    tmp_path: Path, text: str, error: type[Exception], words: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(error, match=re.escape(words)):
        let_in_one(kind(), f"{file}:Mine")


@pytest.mark.parametrize("text", ["import statistics\nstatistics.HALF", "from statistics import HALF"])
def test_a_neighbour_that_another_module_hides_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(f"import random\n{text}\n")
    (tmp_path / "statistics.py").write_text("HALF = 0.5\n")
    (tmp_path / "json.py").write_text("")  # which it does not import
    with pytest.raises(AppError, match=r"HALF.*statistics\.py has the name of another module") as raised:
        let_in_one(kind(), f"{tmp_path / 'own.py'}:Mine")
    assert "json.py" not in str(raised.value)


def test_a_part_in_a_zip_file_has_a_digest_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run is not gone on with by other code, as with a part in a file."""
    source = "class Mine:\n    name, turn = 'mine', 1\n"
    digests = list[str]()
    for name, text in (
        ("one", source),
        ("two", f"# the same\n{source}"),
        ("three", source + "    more = 2\n"),
    ):
        packed, widgets = tmp_path / f"{name}.zip", kind()
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr(f"zipped_{name}.py", text)
        monkeypatch.syspath_prepend(packed)
        let_in_one(widgets, f"zipped_{name}:Mine")
        config = merge([("test", {"strategy": {"name": f"zipped_{name}:Mine"}})])
        digests += source_digests(config, [widgets], None).values()
    assert digests[0] == digests[1] != ""
    assert digests[2] not in ("", digests[0])


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(AppError, match=r"nowhere\.py: there is no such file"):
        let_in_one(kind(), "nowhere.py:Mine")


def test_a_name_that_is_unknown_says_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"must be one of plain, not 'plane'; did you mean 'plain'\? Or name"
    ):
        kind().find("plane")
    with pytest.raises(ConfigError, match=r"which is code: only a command line or"):
        kind().find("./own.py:Mine")


def test_a_configuration_that_was_found_loads_nothing_unless_it_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()")
    config = merge([("found", {"strategy": {"name": f"{file}:Mine"}})])
    with pytest.raises(
        ConfigError, match=r"strategy\.name = .* which is code: look at it, then say --load-code"
    ):
        check_trusted(config, [STRATEGIES], "a run")
    with pytest.raises(ConfigError, match="which is code"):
        STRATEGIES.find(config.strategy.name)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AppError, match="no attribute"):
        let_in(config, [STRATEGIES])
    assert (tmp_path / "ran").exists(), "it would have run"


# --- codec stages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Good(ValuesStage):
    times: int = 1
    name: ClassVar[str] = "good"
    number: ClassVar[int] = 130

    def raw_max(self, k: int, n: int) -> int:
        return 0

    def encode(self, value: Any, context: Any) -> Any: ...

    def decode(self, value: Any, context: Any) -> Any: ...


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": 1}, "number must be from 128 to 255"),
        ({"number": 256}, "number must be from 128 to 255"),
        ({"version": 0}, "version from 1 to 255"),
        ({"place": "nowhere"}, "place must be one of selection, values, indices, entropy, not 'nowhere'"),
        ({"name": "Good"}, "a codec stage's name is of small letters and digits, not 'Good'"),
        ({"name": "log"}, "not 'log'"),
    ],
)
def test_a_stage_that_the_wire_cannot_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        registry.CODEC_STAGES.check(type("Bad", (Good,), changes), "bad.py:Bad")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> PartKind:
    """The registry, without what other tests have let in, as it is given back."""
    monkeypatch.setattr(registry.CODEC_STAGES, "_let_in", {})
    registry.make_codec.cache_clear()
    return registry.CODEC_STAGES


def test_a_number_that_is_taken_twice_is_an_error_at_the_start(stages: PartKind) -> None:
    stages.let_in("one.py:Good", Good)
    assert "good:1" in registry.stages()
    stages.let_in("two.py:Other", type("Other", (Good,), {"name": "other"}))
    with pytest.raises(ConfigError, match="'good' and 'other' have one number on the wire, 130"):
        registry.others()


def test_a_stage_of_others_takes_its_arguments_as_its_fields(stages: PartKind) -> None:
    stages.let_in("one.py:Good", Good)
    assert registry._of_others(Good, "")[0](("3",)) == Good(3)
    with pytest.raises(UnknownCodec, match=r"good\(x\)"):
        registry.make_codec("good(x)")
    with pytest.raises(UnknownCodec, match="too many arguments for good, at most 1"):
        registry.make_codec("good(1,2)")
    with pytest.raises(UnknownCodec, match="one of f32, bf16, int8, int4, e3m0, deadzone, good is enough"):
        registry.make_codec("f32|good")


def test_what_is_not_here_is_told_with_the_fix() -> None:
    with pytest.raises(UnknownCodec, match=r"unknown stage 'nowhere'; known: raw, topk.*uplink\.stages"):
        registry.make_codec("nowhere|zstd")
