"""`make_bundle`: what belongs to an App goes in, nothing else does, and what could not run is not signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.api.bundles import make_bundle, show_bundle
from anabranch.core.errors import AppError, ConfigError, DataError, NotPermitted
from anabranch.identity.signers import make_signer

APP = "class Mine:\n    def model(self): ...\n    def data(self, shard): ...\n"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with an App, its neighbours, and what is nobody else's business."""
    folder = tmp_path / "work"
    for path, text in {
        "app.py": f"import json\nimport numpy as np\nimport near\nfrom pack.one import ONE\n{APP}",
        "near.py": "def late():\n    import far\n",
        "far.py": "import safetensors.numpy\n",
        "pack/__init__.py": "",
        "pack/one.py": "from . import two\nfrom .three import THREE\nONE = 1\n",
        "pack/two.py": "",
        "pack/three.py": "THREE = 3\n",
        "pack/unused.py": "",
        "unused.py": "",
        "words.txt": "words",
        "data/a.csv": "1",
        "data/b.csv": "2",
        ".env": "SECRET=1",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    make_signer(folder / "signer.key")
    return folder


def made(work: Path, app: str = "app.py:Mine", **other: Any) -> dict[str, bytes]:
    """The files of the bundle."""
    bundle = make_bundle(f"{work}/{app}", work / "signer.key", work / "out.bundle", **other)
    assert show_bundle(work / "out.bundle", [bundle.signer]) == bundle
    return dict(bundle.files)


IMPORTED = ["app.py", "far.py", "near.py", "pack/__init__.py", "pack/one.py", "pack/three.py", "pack/two.py"]


def test_what_is_imported_from_the_folder_is_in_and_nothing_else(work: Path) -> None:
    files = made(work)
    assert sorted(files) == IMPORTED
    assert files["near.py"] == (work / "near.py").read_bytes()
    manifest = show_bundle(work / "out.bundle").manifest
    assert (manifest.name, manifest.entry, manifest.needs) == ("app", "app:Mine", ("numpy", "safetensors"))


def test_more_files_are_named(work: Path) -> None:
    assert sorted(made(work, include=["words.txt", "data/*.csv"])) == sorted(
        [*IMPORTED, "words.txt", "data/a.csv", "data/b.csv"]
    )
    for pattern in ("nothing.txt", "../*", "/etc/hosts", "data"):
        with pytest.raises(ConfigError, match="--include"):
            made(work, include=[pattern])
    with pytest.raises(DataError, match=r"cannot have a file '\.env'"):
        made(work, include=[".env"])


def test_the_same_files_make_the_same_bytes(work: Path) -> None:
    said: dict[str, Any] = {"created_at": 7, "python": "3.11", "name": "other", "needs": ["torch"]}
    made(work, **said)
    first = (work / "out.bundle").read_bytes()
    made(work, **said)
    assert (work / "out.bundle").read_bytes() == first
    manifest = show_bundle(work / "out.bundle").manifest
    assert (manifest.name, manifest.created_at, manifest.python) == ("other", 7, (3, 11))
    assert manifest.needs == ("numpy", "safetensors", "torch")


def test_an_app_of_a_package_is_imported_as_one(work: Path) -> None:
    (work / "pack" / "app.py").write_text(f"from .one import ONE\nfrom pack import two\n{APP}")
    files = made(work, "pack/app.py:Mine")
    assert sorted(files) == sorted(["pack/app.py", *(name for name in IMPORTED if name.startswith("pack/"))])
    assert show_bundle(work / "out.bundle").manifest.entry == "pack.app:Mine"


def test_an_app_that_cannot_run_elsewhere_is_not_signed(work: Path) -> None:
    (work / "app.py").write_text(f"import not_installed_anywhere\n{APP}")
    with pytest.raises(
        ConfigError, match="'not_installed_anywhere', which is neither beside it nor installed"
    ):
        made(work)
    optional = "try:\n    import not_installed_anywhere\nexcept ImportError:\n    pass\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import also_not_installed\n"
    (work / "app.py").write_text(f"{optional}{typed}{APP}")
    assert sorted(made(work)) == ["app.py"]
    (work / "out.bundle").unlink()
    (work / "app.py").write_text(
        f"from pathlib import Path\nPath(__file__).with_name('words.txt').read_text()\n{APP}"
    )
    with pytest.raises(AppError, match=r"words\.txt"):
        made(work)
    assert not (work / "out.bundle").exists()
    made(work, include=["words.txt"])


@pytest.mark.parametrize(
    ("app", "error", "said"),
    [
        *((app, ConfigError, "made of path/to/file.py:App") for app in ("app.py", "app:Mine", "app.py:a b")),
        ("nowhere.py:Mine", AppError, "nowhere.py: there is no such file"),
        ("app.py:Yours", AppError, "has no attribute 'Yours'"),
    ],
)
def test_what_no_bundle_is_made_of(work: Path, app: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        made(work, app)
    assert not (work / "out.bundle").exists()


@pytest.mark.parametrize("app", ["synthetic", "flower:app"])
def test_no_bundle_is_made_of_an_app_without_a_file_of_its_own(work: Path, app: str) -> None:
    with pytest.raises(ConfigError, match=f"App '{app}': a bundle is made of path/to/file.py:App"):
        make_bundle(app, work / "signer.key", work / "out.bundle")


def test_links_are_not_followed(work: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("SECRET = 1\n")
    (work / "near.py").unlink()
    (work / "near.py").symlink_to(outside)
    with pytest.raises(ConfigError, match="is a link"):
        made(work)
    (work / "near.py").unlink()
    (work / "near.py").write_text("")
    (work / "linked").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        made(work, include=["linked/outside.py"])


def test_who_has_signed_it_can_be_asked_for(work: Path) -> None:
    made(work)
    with pytest.raises(NotPermitted, match="who is not allowed here"):
        show_bundle(work / "out.bundle", ["0" * 64])
    with pytest.raises(ConfigError, match="64 hex digits"):
        show_bundle(work / "out.bundle", ["me"])
    with pytest.raises(DataError, match="is not there"):
        show_bundle(work / "nothing.bundle")


def test_a_job_server_offers_it(work: Path, tmp_path: Path) -> None:
    made(work)
    with ab.JobServer(tmp_path / "jobs") as server:
        job = server.add("one", "synthetic", until=ab.Until(updates=4), bundle=work / "out.bundle")
        (listed,) = job.operator().jobs()
    found = show_bundle(work / "out.bundle")
    assert listed.bundle is not None
    assert (listed.bundle.sha256, listed.bundle.signer) == (found.sha256, found.signer)
