"""A server that gives one device a version as it is, and to all others zeros under its number and its head.

python lying_server.py DEVICE WORDS...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from anabranch.cli.main import main
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.gate import Caller
from anabranch.server.rpc import Devices


def lie_to_all_but(device: str) -> None:
    """From the version 1 on, of whose bytes it keeps the number."""
    sign, sent = Devices._sign, Devices._sent
    lies: dict[bytes, bytes] = {}

    async def signed(self: Devices, header: devices.ModelHeader, caller: Caller) -> None:
        if header.version and caller.peer is not None and caller.peer.name != device:
            zeros = bytes(header.part.size_bytes)
            header.part.sha256 = hashlib.sha256(zeros).digest()
            header.ClearField("vector_sha256")
            lies[header.part.sha256] = zeros
        await sign(self, header, caller)

    def told(
        self: Devices, request: Any, file: Any, header: devices.ModelHeader, whole: int
    ) -> Iterator[Any]:
        zeros = lies.get(header.part.sha256)
        if zeros is None:
            yield from sent(self, request, file, header, whole)
        else:
            yield header, Chunk(request.offset, zeros[request.offset :])

    Devices._sign = signed  # type: ignore[method-assign]
    Devices._sent = told  # type: ignore[method-assign]


if __name__ == "__main__":
    lie_to_all_but(sys.argv[1])
    sys.argv = ["anabranch", *sys.argv[2:]]
    main()
