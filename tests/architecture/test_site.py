"""The documentation's site (`make docs`): its list has every page, and what is made for it is right."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anabranch


def loaded() -> Any:
    """What mkdocs loads by its path."""
    path = Path(__file__).parents[2] / "scripts/site.py"
    spec = importlib.util.spec_from_file_location("documentation_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = loaded()
DOCS = site.ROOT / "docs"
MADE = {"reference.md", *site.OF_ROOT}


def listed() -> set[str]:
    """The pages that mkdocs.yml lists."""
    nav = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return set(re.findall(r"(\S+\.md)$", nav, re.M))


def test_every_page_is_listed() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    notebooks = {str(path.relative_to(DOCS).with_suffix(".md")) for path in DOCS.rglob("*.ipynb")}
    assert listed() == pages | notebooks | MADE


def rewritten(at: str, text: str) -> str:
    """A page's text on the site."""
    files = [SimpleNamespace(src_uri=name) for name in (*listed(), "studies/teasq.svg")]
    page = SimpleNamespace(file=SimpleNamespace(src_uri=at))
    found: str = site.on_page_markdown(text, page, None, files)
    return found


def test_links_lead_to_pages_or_to_the_repository() -> None:
    assert rewritten("app.md", "[a](deploying.md#backups)") == "[a](deploying.md#backups)"
    assert rewritten("extending/app.md", "[a](../app.md)") == "[a](../app.md)"
    assert rewritten("durability.md", "[a](../SECURITY.md)") == "[a](SECURITY.md)"
    assert rewritten("SECURITY.md", "[a](docs/robust.md#x)") == "[a](robust.md#x)"
    assert rewritten("extending/app.md", "[a](../../README.md)") == "[a](../index.md)"
    code = f"{site.REPOSITORY}/docker/compose.yaml"
    assert rewritten("deploying.md", "[a](../docker/compose.yaml)") == f"[a]({code})"
    assert rewritten("python.md", "[a](tutorials/two-strategies.ipynb)") == "[a](tutorials/two-strategies.md)"
    for kept in ("[a](#here)", "[a](https://flower.ai)", "![a](studies/teasq.svg)"):
        assert rewritten("app.md", kept) == kept


def test_the_reference_has_what_is_exported() -> None:
    found = re.findall(r"^::: \S*?(\w+)$", site._reference(), re.M)
    homes = {"Faults": "FaultsTable", "Robust": "RobustTable", "Training": "ClientTable"}
    assert sorted(found) == sorted(homes.get(name, name) for name in anabranch.__all__)


def test_a_notebook_is_a_page(tmp_path: Path) -> None:
    outputs = [
        {"text": ["1\n", "2\n"]},
        {"data": {"image/png": "AA=="}},
        {"data": {"text/html": ["<b>x</b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["run()"], "outputs": outputs},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    text = site.notebook(tmp_path / "n.ipynb")
    assert text.startswith("# Title\nwords\n\n```python\nrun()\n```\n\n```text\n1\n2\n```")
    assert "data:image/png;base64,AA==" in text
    assert text.endswith(
        '<b>x</b>\n\n<a href="n.ipynb" download>The notebook itself</a>, to be run cell by cell.\n'
    )


def test_the_site_loads_nothing_from_outside() -> None:
    page = SimpleNamespace(file=SimpleNamespace(dest_uri="extending/app.html"))
    assert site.on_post_page(f'<script src="{site.OUTSIDE}">', page, None) == (
        '<script src="../assets/iframe-worker.js">'
    )
    assert (DOCS / "assets/iframe-worker.js").is_file()
