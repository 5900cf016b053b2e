"""Every kind of store, and a short history to put in one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import Backend, make_backend, on_disk_fixture

from anabranch.server.store.base import Store
from anabranch.testing.store import History
from anabranch.testing.store import a_history as short_history


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's deadline is not what these tests are about: a busy machine is given time to answer."""
    monkeypatch.setattr("anabranch.client.transport.CONTROL_S", 120.0)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request.param, tmp_path / "data", request)


on_disk = on_disk_fixture("sqlite", "postgresql")


@pytest.fixture
def store(backend: Backend) -> Iterator[Store]:
    opened = backend.start()
    yield opened
    opened.close()


@pytest.fixture
def a_history() -> History:
    return short_history()


LOOPS = "anabranch.core.kernels._loops"


@pytest.fixture(scope="session")
def loops_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The compiled loops can be imported: those that were installed, or such as are made here."""
    if LOOPS not in sys.modules and importlib.util.find_spec(LOOPS) is None:
        _make_loops(tmp_path_factory.mktemp("loops"))


def _make_loops(folder: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("there is no compiler")
    made = folder / "_loops.abi3.so"
    flags = ["-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Werror", "-shared", "-fPIC"]
    sources = sorted((Path(__file__).parents[2] / "core/kernels").glob("*.c"))
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([compiler, *flags, include, *sources, "-o", made], check=True)
    spec = importlib.util.spec_from_file_location(LOOPS, made)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[LOOPS] = module
