"""Generate the protobuf and gRPC code of `protos/v1`, with its type stubs.

The code is committed: nobody needs a compiler to install, and reviewers see what changes on the
wire. `tests/architecture/test_protos.py` generates it again and compares byte for byte.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]

# Newer compilers emit code that refuses to load under the protobuf 6 that Flower needs.
GRPC_TOOLS = "1.81.1"


def generate(out: Path) -> list[Path]:
    """Write the code under `out`/anabranch/protos/v1 and return its files, sorted.

    Raises:
        SystemExit: the compiler has another version, or finds an error in a .proto file.
    """
    if version("grpcio-tools") != GRPC_TOOLS:
        raise SystemExit(f"grpcio-tools is {version('grpcio-tools')}: pip install grpcio-tools=={GRPC_TOOLS}")
    sources = sorted((ROOT / "protos" / "v1").glob("*.proto"))
    services = [path for path in sources if re.search(r"^service ", path.read_text(), re.MULTILINE)]
    _compile(sources, ("python", "mypy"), out)
    _compile(services, ("grpc_python", "mypy_grpc"), out)
    return sorted((out / "anabranch" / "protos" / "v1").glob("*_pb2*.py*"))


def _compile(sources: Sequence[Path], kinds: Sequence[str], out: Path) -> None:
    if not sources:
        return
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        # The virtual path gives the messages their import path: `from anabranch.protos.v1 import ...`.
        f"-Ianabranch/protos={ROOT / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        *(f"--{kind}_out={out}" for kind in kinds),
        *(f"--{kind}_opt=quiet" for kind in kinds if kind.startswith("mypy")),
        *(f"anabranch/protos/v1/{path.name}" for path in sources),
    ]
    if status := protoc.main(arguments):
        raise SystemExit(status)


def main() -> None:
    """Generate into the tree, or under `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "src", help="import root to write under")
    for path in generate(parser.parse_args().out):
        print(path.name)


if __name__ == "__main__":
    main()
