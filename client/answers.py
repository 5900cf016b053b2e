"""From the messages of the service for devices to what a transport brings back."""

from __future__ import annotations

import json
from typing import Any

from anabranch.client.messages import FetchedModel, HeartbeatAnswer, Notice, NoticeKind, PushAnswer
from anabranch.core.errors import ProtocolError
from anabranch.core.secagg.terms import Terms
from anabranch.identity.keepers import KeeperKey, Masking
from anabranch.protos import convert
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model

_NOTICES = {
    devices.NOTICE_KIND_CANCEL: NoticeKind.CANCEL,
    devices.NOTICE_KIND_UPLOAD_NOW: NoticeKind.UPLOAD_NOW,
    devices.NOTICE_KIND_REFRESH: NoticeKind.REFRESH,
    devices.NOTICE_KIND_FINISHED: NoticeKind.FINISHED,
}


def heartbeat_answer(message: devices.HeartbeatResponse) -> HeartbeatAnswer:
    """When the lease ends, and the notices."""
    notices = tuple(
        Notice(_NOTICES.get(n.kind, NoticeKind.OTHER), n.task_id, n.detail) for n in message.notices
    )
    return HeartbeatAnswer(message.expires_at_s, message.version, notices)


def not_modified(header: devices.ModelHeader) -> FetchedModel:
    """That there is no newer model."""
    return FetchedModel(header.version, "", b"", header.published_at_s, header.final, modified=False)


def push_answer(message: devices.PushUpdateResponse) -> PushAnswer:
    """What became of an update."""
    duplicate = message.status == devices.PUSH_STATUS_DUPLICATE
    return PushAnswer(convert.decision_from_proto(message.decision), message.version, duplicate)


def config_of(said: str) -> dict[str, Any]:
    """The tables of the configuration that a server tells. Raises `ProtocolError`."""
    try:
        config = json.loads(said or "{}")
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not all(isinstance(table, dict) for table in config.values()):
        raise ProtocolError(
            "the server's config_json is no JSON object of tables: it is no server of this protocol"
        )
    return config


def masking_of(said: model.Masking) -> Masking:
    """What a server says of masked sums. Raises `ConfigError` and `ProtocolError`."""
    keys = [KeeperKey(key.certificate, key.public_key, key.signature) for key in said.keepers]
    try:
        terms = Terms.from_json(json.loads(said.terms_json))
    except (ValueError, RecursionError):
        raise ProtocolError("the server's terms of masked sums are no JSON") from None
    return Masking(terms, keys)
