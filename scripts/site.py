"""What the documentation's site has besides the pages of `docs`: mkdocs calls this, see mkdocs.yml.

Pages of the root (SECURITY.md and so on), a reference of what `anabranch` exports, and the notebooks. A link
to anything else of the tree leads to the repository. Nothing is loaded from outside.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = "docs"
OF_ROOT = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
REPOSITORY = "https://github.com/anabranch/anabranch/blob/main"
OUTSIDE = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
REFERENCE = (
    "# Python reference\n\nWhat `import anabranch as ab` has, made from the docstrings; "
    "[In Python](python.md) tells how it goes together.\n\n"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    file = type(next(iter(files)))
    for name in OF_ROOT:
        files.append(file.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(file.generated(config, "reference.md", content=REFERENCE + _reference()))
    for path in sorted((ROOT / DOCS).rglob("*.ipynb")):
        page = path.relative_to(ROOT / DOCS)
        # The notebook stays among the files, to be had.
        files.append(file.generated(config, str(page.with_suffix(".md")), content=notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs'
    """Let links lead to pages of the site, and to the repository where there is none."""
    at, here = page.file.src_uri, {file.src_uri for file in files}
    folder = "" if at in OF_ROOT else posixpath.join(DOCS, posixpath.dirname(at))

    def led(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        own = path.removeprefix(f"{DOCS}/").replace(".ipynb", ".md")
        if own in here and (path.startswith(f"{DOCS}/") or own in OF_ROOT):
            return f"]({posixpath.relpath(own, posixpath.dirname(at) or '.')}{anchor})"
        if path == "README.md":
            return f"]({posixpath.relpath('index.md', posixpath.dirname(at) or '.')})"
        return f"]({REPOSITORY}/{path}{anchor})"

    return LINK.sub(led, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001 - mkdocs'
    """What the search wants for a site on a disk is here, and not on another machine."""
    own = posixpath.relpath("assets/iframe-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace(OUTSIDE, own)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:  # noqa: ARG001 - mkdocs'
    """The same for the page of what is not there."""
    return output_content.replace(OUTSIDE, "assets/iframe-worker.js")


def _reference() -> str:
    """A directive for each exported name, by where it is at home."""
    tree = ast.parse((ROOT / "src/anabranch/__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names
    }
    exported: list[str] = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return "\n".join(f"::: {homes[name]}\n" for name in sorted(exported, key=str.lower))


def notebook(path: Path) -> str:
    """A notebook as a page: its words, its code, what came of it, and the way to itself."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts += [f"```python\n{source}\n```", *map(_output, cell.get("outputs", []))]
    parts.append(f'<a href="{path.name}" download>The notebook itself</a>, to be run cell by cell.')
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    """A picture, a table or text."""
    data = output.get("data", {})
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="what the cell shows" src="data:image/png;base64,{png}">'
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(data.get("text/plain", output.get("text", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""
