"""The engine of a live run is the writer's thread's alone."""

from __future__ import annotations

import ast
from pathlib import Path

from anabranch.server.writer import Writer


def test_nobody_but_the_writer_reaches_its_engine(package_dirs: dict[str, Path]) -> None:
    """Whoever is on the event loop has a glance, or asks by `look`."""
    assert not hasattr(Writer, "engine")
    for path in sorted(package_dirs["anabranch.server"].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("_books", "engine"):
                owner = ast.unparse(node.value)
                assert not owner.endswith("writer"), f"{path.name}:{node.lineno}"
                assert (path.name, owner, node.attr) != ("writer.py", "self", "engine"), node.lineno
                assert node.attr == "engine" or path.name == "writer.py", f"{path.name}:{node.lineno}"
