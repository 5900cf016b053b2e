"""docs/privacy.md: its figures are the accountant's, its file runs, its strategies can be private."""

from __future__ import annotations

import math
import re
import tomllib

import numpy as np
import pytest
from pages import ROOT

from anabranch.core.config.tables import merge
from anabranch.core.model.params import ParamSpec
from anabranch.core.privacy.accountant import coefficients, mu_of, sensitivity
from anabranch.core.secagg.terms import weights_of
from anabranch.host.build import Blueprint
from anabranch.host.private import ADDING
from anabranch.host.secagg import GATHERING
from anabranch.strategies.staleness import make_staleness

PAGE = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def row(first: str) -> list[str]:
    """The other cells of the row that begins so."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return cells(found)[1:]


def test_its_table_of_noise() -> None:
    participations = [int(cell.removeprefix("participations ")) for cell in row("ε")]
    assert participations == [1, 4, 16, 64]
    for epsilon in (1, 2, 4, 8):
        needed = [math.sqrt(k) / mu_of(epsilon, 1e-6) for k in participations]
        assert row(str(epsilon)) == [f"{math.ceil(noise * 100) / 100:.2f}" for noise in needed], "no less"


def test_its_table_of_bands() -> None:
    """By matrices of 1,000 versions: the noise of all prefix sums, at the noise that one epsilon takes."""
    versions, errors = 1000, []
    bands = [int(cell) for cell in row("bands")]
    for m in bands:
        c = sum(value * np.eye(versions, k=-j) for j, value in enumerate(coefficients(m)))
        noise = np.tril(np.ones((versions, versions))) @ np.linalg.inv(c)
        errors.append(float(np.linalg.norm(noise)) * sensitivity(m, 4))
    told = [float(cell) for cell in row("times less noise in the model")]
    assert told == pytest.approx([errors[0] / error for error in errors], abs=0.005)
    assert [int(c) for c in row("models in the server's memory beside, as float64")] == [m - 1 for m in bands]


def test_its_file_is_a_private_run() -> None:
    tables = tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])
    config = merge([("the page", tables)])
    assert (
        Blueprint.of(config, ParamSpec.of({"w": np.zeros(2, np.float32)}), key=bytes(32)).sums() is not None
    )
    # Its devices may give as many updates as its versions want.
    assert config.fleet.clients * config.privacy.participations >= config.run.versions_max * 10


def test_it_names_the_strategies_that_can_be_private() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| other strategies than `fedbuff`, ")]
    assert re.findall(r"`(\w+)`", cells(line)[0]) == ["fedbuff", "qafel", "fedavg", "fedprox"]
    assert [cls.name for cls in ADDING] == ["fedbuff", "qafel", "fedavg", "fedprox"]


def test_its_simulated_file_has_masked_sums_and_it_names_their_strategies() -> None:
    tables = tomllib.loads(PAGE.partition("`sums.toml`:\n\n```toml\n")[2].partition("```")[0])
    spec = ParamSpec.of({"w": np.zeros(2, np.float32)})
    assert Blueprint.of(merge([("the page", tables)]), spec, masks=True).cohorts() is not None
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| other strategies than `fedbuff` and")]
    assert re.findall(r"`(\w+)`", cells(line)[0]) == [cls.name for cls in GATHERING]
    assert "fresh update counts 16, by FedBuff's default one of a version before 11" in PAGE
    assert weights_of(make_staleness({"name": "polynomial", "a": 0.5}), 16)[:2] == (16, 11)
