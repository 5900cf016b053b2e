"""What a task starts from is of the task's own history, or it is not trained from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.client.held import HeldModels, kept_model
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import FetchedModel, GrantedTask
from anabranch.client.summary import AgentSummary
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ManifestMismatch, UnknownVersion
from anabranch.core.model.updates import Capability, LocalPlan
from anabranch.testing.federation import config, first_weights
from anabranch.workloads.synthetic import Synthetic

OURS, OTHER = "0a" * 32, "0b" * 32


class Named(LocalTransport):
    """Over it versions have a name, and are of a run."""

    head, run_id = OURS, "run-1"

    def fetch(self, *args: Any, **options: Any) -> FetchedModel:
        return replace(super().fetch(*args, **options), head=self.head, run_id=self.run_id)


def test_no_version_of_another_history_or_run_is_trained_from_or_kept(tmp_path: Path) -> None:
    """The server's data may be put back between a grant and its fetch."""
    server = LocalServer(first_weights(), config())
    transport, local = Named(server, "a"), LocalTrainer(Synthetic(), ClientTable())
    transport.enrol(Capability())
    told: list[str] = []
    summary = AgentSummary("a")
    models = HeldModels(local, transport, tmp_path, lambda: 0.0, summary, lambda kind, **_: told.append(kind))
    models.join("run-1")
    task = GrantedTask("t", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan(), base_head=OURS)
    for transport.head, transport.run_id, error, words in (
        (OTHER, "run-1", UnknownVersion, "not that of the task, which is of another history"),
        (OURS, "run-2", ManifestMismatch, "run run-2 is served by now, and no longer run-1"),
    ):
        with pytest.raises(error, match=words):
            models.get(task)
        assert (models.holds, kept_model(tmp_path, "run-1", local.spec)) == (None, None)
    transport.run_id = "run-1"
    assert np.array_equal(models.get(task).vector, local.spec.flatten(first_weights()))
    assert models.holds == 0
    kept = kept_model(tmp_path, "run-1", local.spec)
    assert kept is not None
    assert (kept.version, kept.head) == (0, OURS)
