"""What all devices of a run with masked sums train by, in one digest, which is in the terms.

With another plan for one device than for the others, such as a learning rate of next to nothing, a sum would
be that one's update. So a device takes no task whose plan is not the terms', and seals for keepers under
those terms. Of a task only its seed and its base are not in it: what the base was, a box says.

Not in it either: which part of data that all have a device trains on (`[fleet]`), and what an App of one's
own makes of the run's tables in `join`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from anabranch.core.canonical import canonical
from anabranch.core.config.ranges import ELASTIC
from anabranch.core.config.tables import ClientTable
from anabranch.core.model.updates import LocalPlan

# Of [client], beside what travels with each task: what devices read when they join.
JOINED = ("gradient", "gradient_eps", "gradient_max", "gradient_queries")


def plan_digest(local: LocalPlan, client: ClientTable, buffers: str, layout_hash: str) -> str:
    """SHA-256 (hex) of a plan: JSON, sorted keys, no spaces. `local`: of the task; the others, of the run."""
    words = {
        "buffers": buffers,
        "client": _plain(client, JOINED),
        "elastic": client.push == ELASTIC,
        "layout": layout_hash,
        "local": _plain(local, (f.name for f in fields(LocalPlan))),
    }
    return hashlib.sha256(canonical(words)).hexdigest()


def _plain(table: Any, names: Iterable[str]) -> dict[str, Any]:
    """Fields by name, each of its default's type: a rate of 1 is that of 1.0, as it comes over the wire."""
    return {name: type(getattr(type(table), name))(getattr(table, name)) for name in names}
