"""The committed protobuf code is what the compiler makes of the .proto files today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_generated_code_is_current(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "generate_protos.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_bytes() for path in (tmp_path / "anabranch/protos/v1").glob("*_pb2*.py*")}
    committed = {path.name: path.read_bytes() for path in (root / "protos" / "v1").glob("*_pb2*.py*")}
    assert made, "protos/v1 has no .proto file"
    assert sorted(made) == sorted(committed), "run `make protos`"
    assert [name for name in made if made[name] != committed[name]] == [], "run `make protos`"


def test_generated_code_imports_itself_by_its_full_name(root: Path) -> None:
    for path in (root / "protos" / "v1").glob("*_pb2*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import ", "from ")) and "_pb2" in line:
                assert line.startswith(("from anabranch.protos.v1 ", "from google.protobuf ")), line
