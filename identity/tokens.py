"""What a token looks like that lets a device join once: its id, which is no secret, a dot, and its secret."""

from __future__ import annotations

import re
import secrets

from anabranch.core.errors import NotAuthenticated

ID_BYTES = 8  # of thousands at a time none may come twice
SECRET_BYTES = 32
# Those of the first releases had ids of 4 bytes.
_SHAPE = re.compile(r"([0-9a-f]{8}|[0-9a-f]{16})\.[\w-]{43}", re.ASCII)


def new_token() -> tuple[str, str]:
    """An id and a secret."""
    return secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)


def check_token(token: str) -> None:
    """Raises `NotAuthenticated` for what cannot be one: it is mistyped, or a part of one."""
    if not _SHAPE.fullmatch(token):
        raise NotAuthenticated(
            "the token is mistyped, or not whole: one has 16 hexadecimal digits, a dot and 43 more letters, "
            f"and this one has {len(token)} in all. Give it as `anabranch admin enrol` printed it"
        )
