"""A version of a run as its App's plain model: what was trained beside the weights is merged into them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.numpy import load_file

from anabranch.client.operator import OperatorClient, TellBytes
from anabranch.reports.models import write_model
from anabranch.workloads import calls
from anabranch.workloads.app import App


def export_merged(
    server: OperatorClient,
    app: App,
    path: Path,
    version: int | None = None,
    best: bool = False,
    tell: TellBytes = lambda _written, _size: None,
) -> int:
    """`OperatorClient.export` of the plain model's tensors; returns which version.

    The file appears only when it is whole. Raises `UnknownVersion`, `AppError` where there is nothing to
    merge, and `ManifestMismatch` where the run is of another model than the App's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=path.parent) as folder:
        whole = Path(folder) / "model.safetensors"
        exported = server.export(whole, version, best, tell=tell)
        write_model(path, calls.merged(app, load_file(whole)), exported)
    return exported
