"""What a transport brings back, in terms of the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from anabranch.core.effects import Refused
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Decision, Task
from anabranch.host.first import FirstModel
from anabranch.identity.keepers import Masking


@dataclass(frozen=True)
class Enrolment:
    """The run that the server serves. `config` has the tables that a device may read.

    `frozen_sha256` (hex) is of the frozen tensors, where these travel apart; empty where they do not.
    `first`: what a device may build version 0 from, None where it is to be fetched. `masking`: of a run with
    masked sums.
    """

    run: str
    run_id: str
    spec: ParamSpec
    config: Mapping[str, Any]
    version: int
    frozen_sha256: str = ""
    first: FirstModel | None = None
    masking: Masking | None = None


@dataclass(frozen=True)
class GrantedTask(Task):
    """A task and the head (hex) of the version that it starts from: see `BaseModel.head`."""

    base_head: str = ""


@dataclass(frozen=True, eq=False)
class FetchedModel:
    """A published version, encoded, its digest checked.

    `modified` is False when there is none above the one asked about: `data` is empty then. `final`:
    the run has ended, and `version` is its last. `from_version`: the payload leads from that one.
    `vector_sha256` (hex) is the digest of the decoded vector, empty where the payload's own says as much.
    `part_only`: it is a model of the wanted sub-model's shapes. `head`: see `BaseModel`. `run_id`: empty over
    an open port.
    """

    version: int
    codec: str
    data: bytes | bytearray
    published_at_s: float = 0.0
    final: bool = False
    modified: bool = True
    from_version: int | None = None
    vector_sha256: str = ""
    part_only: bool = False
    head: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class PushAnswer:
    """What became of an update, for good. `duplicate`: it had been decided before."""

    decision: Decision
    version: int
    duplicate: bool = False
    next: Task | Refused | None = None  # where it was asked for with the push


@dataclass(frozen=True)
class UploadState:
    """How much of an upload the server has, and its answer if the update was decided."""

    received_bytes: int
    answer: PushAnswer | None = None


class NoticeKind(StrEnum):
    """What a server may tell a device at a heartbeat; kinds of a newer server are `OTHER`."""

    CANCEL = "cancel"
    UPLOAD_NOW = "upload_now"
    REFRESH = "refresh"
    FINISHED = "finished"
    OTHER = "other"


@dataclass(frozen=True)
class Notice:
    """A notice; `task_id` is empty when it concerns the whole run."""

    kind: NoticeKind
    task_id: str
    detail: str


@dataclass(frozen=True)
class HeartbeatAnswer:
    """When the lease ends now (server time, seconds), the newest version, and the notices."""

    expires_at: float
    version: int
    notices: tuple[Notice, ...] = ()
