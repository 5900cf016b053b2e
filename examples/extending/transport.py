"""A transport of one's own: gRPC, behind an address in a file, so that devices follow a server that moves.

`anabranch client ... --part transport=transport.py:FromFile --server file:///etc/anabranch/server`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from anabranch.client.transport import GrpcTransport
from anabranch.identity.wallet import Wallet


class FromFile(GrpcTransport):
    name: ClassVar[str] = "file"  # of addresses that begin with file://

    @classmethod
    def of(cls, address: str, client_id: str, wallet: Wallet | None) -> Any:
        where = Path(address.removeprefix("file://"))
        return cls(where.read_text(encoding="utf-8").strip(), client_id, wallet=wallet)
