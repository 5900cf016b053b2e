"""The documents say what the code does: their tables against the code, the example of docs/strategies.md."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from anabranch.compress.registry import stages
from anabranch.core.config.tables import NO_KEY, TABLES
from anabranch.core.errors import OUTCOMES
from anabranch.core.limits import DEFAULT_LIMITS, GIB, KIB, MIB
from anabranch.core.model.updates import Reason
from anabranch.protos import v1 as protos
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.schedulers.registry import SCHEDULERS

ROOT = Path(__file__).parents[2]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading or a header row."""
    rows = PROTOCOL[PROTOCOL.index(heading) :].split("\n\n")
    body = next(part for part in rows if part.lstrip().startswith("|"))
    return [
        [c.strip().strip("`") for c in line.strip("|").split("|")] for line in body.strip().splitlines()[2:]
    ]


def test_the_error_table() -> None:
    expected = {
        (e.__name__, o.grpc_status, str(o.exit_code), "again" if o.retryable else "")
        for e, o in OUTCOMES.items()
    }
    assert {tuple(row) for row in table("\n## Errors")} == expected


def test_the_limits() -> Any:
    sizes = {" KiB": KIB, " MiB": MIB, " GiB": GIB}

    def number(text: str) -> float:
        unit = next((u for u in sizes if text.endswith(u)), "")
        return float(text.removesuffix(unit)) * sizes.get(unit, 1)

    assert {name: number(value) for name, value in table("\n## Limits")} == asdict(DEFAULT_LIMITS)


def test_the_reasons() -> None:
    documented = {row[0] for row in table("\n| reason |")}
    assert documented == {r.value for r in Reason} - {""}


def test_the_stages() -> None:
    listed = PROTOCOL.partition("The stages of this version")[2].partition("```text\n")[2].partition("```")[0]
    assert tuple(listed.split()) == stages()


SERVICES = [
    service
    for path in sorted(Path(protos.__path__[0]).glob("*_pb2.py"))
    for service in import_module(f"anabranch.protos.v1.{path.stem}").DESCRIPTOR.services_by_name.values()
]


@pytest.mark.parametrize("service", SERVICES, ids=lambda s: s.name)
def test_every_call_is_described(service: Any) -> None:
    assert [m.name for m in service.methods if f"`{m.name}`" not in PROTOCOL] == []


def test_there_are_services() -> None:
    assert {"Devices", "Keepers", "Operators"} <= {service.name for service in SERVICES}


def test_the_strategies_example() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    *statements, expected = code.strip().splitlines()
    command = [sys.executable, "-c", "\n".join(statements)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    assert said[-2:] == expected.split()[-2:]
    assert [float(x.strip("[]")) for x in said[:3]] == pytest.approx(
        [float(x.strip("#[] ")) for x in expected.split()[1:4]]
    )


def strategies_named(page: str, sentence: str) -> set[str]:
    """The strategies that a sentence names: `sentence` is a pattern, whose group they stand in."""
    found = re.search(sentence, (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert found is not None
    return set(re.findall(r"`(\w+)`", found[1]))


def test_the_strategies_that_take_a_rule() -> None:
    takers = {name for name, cls in STRATEGIES.ours().items() if "rule" in cls.__dataclass_fields__}
    assert strategies_named("robust.md", r"A rule replaces the weighted mean of ([^.]*)\.") == takers


def test_the_strategies_that_take_sub_models() -> None:
    takers = {name for name, cls in STRATEGIES.ours().items() if cls().supports_submodels}
    assert strategies_named("submodels.md", r"as long as that takes sub-models \(([^)]*)\)") == takers


def test_the_settings() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, cls in TABLES.items():
        if name == "strategy":
            continue
        section = page.split(f"## `[{name}]`")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE)
        documented = {key: tomllib.loads(f"x = {value}")["x"] for key, value in rows}
        defaults = {f.name: getattr(cls(), f.name) for f in fields(cls)}
        assert documented == {
            key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()
        }, name


def test_the_settings_of_schedulers() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    section = page.split("## Schedulers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE)
    documented = {(name, key): tomllib.loads(f"x = {value}")["x"] for name, key, value in rows}
    assert documented == {
        (name, f.name): getattr(cls(), f.name) for name, cls in SCHEDULERS.ours().items() for f in fields(cls)
    }


def test_the_settings_of_strategies() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)
    documented = {(strategy, key): tomllib.loads(f"x = {value}")["x"] for strategy, key, value in rows}
    assert "`teasq_drop` has the parameters of `teasq`" in page
    assert documented == {
        (name, key): value
        for name, cls in STRATEGIES.ours().items()
        for key, value in ((f.name, getattr(cls(), f.name)) for f in fields(cls) if f.metadata != NO_KEY)
        if name != "teasq_drop"
    }
