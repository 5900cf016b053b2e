"""One class name, one meaning: who searches for a name finds what it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "anabranch"
# What people who aggregate by hand call an update is one, with plain tensors in it.
TWICE = {"Update": {"aggregation.py", "core/model/updates.py"}}
# So are the run and the server that people have, and those that nobody sees.
TWICE |= {"Run": {"api/run.py", "host/run.py"}, "Server": {"api/live.py", "client/servers.py"}}


def classes_of(root: Path) -> dict[str, set[str]]:
    """The modules, under `root`, that define a class of a name; generated code is not ours to name."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in [root, *(child for child in sorted(root.iterdir()) if child.is_dir())]:
        for path in folder.glob("*.py") if folder == root else folder.rglob("*.py"):
            if "migrations" in path.parts or path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].add(str(path.relative_to(root)))
    return found


def test_every_class_has_a_name_of_its_own() -> None:
    found = classes_of(ROOT)
    assert len(found) > 400
    assert {name: where for name, where in found.items() if len(where) > 1} == TWICE


def test_a_name_that_is_taken_is_found(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "one.py").write_text("class Link:\n    pass\n")
    (tmp_path / "two.py").write_text("class Link:\n    pass\n")
    assert classes_of(tmp_path) == {"Link": {"core/one.py", "two.py"}}
