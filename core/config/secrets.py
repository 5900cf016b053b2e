"""Secrets in settings and messages: who marks them, and what is shown in their place.

A setting that may hold a password is declared with `metadata=SECRET`. `Config.to_json` masks those, and all
that is stored, sent or shown of a configuration comes from it: the fields alone have the clear text. Only the
secret part is masked, so that a changed password does not look like another database.
"""

from __future__ import annotations

import re
from typing import Any

SECRET = {"secret": True}  # the metadata of a field
MASK = "***"

_NAMES = r"\w*(?:password|passwd|pwd|passphrase|secret|token|api_?key|access_?key)"
_ASSIGNED = re.compile(rf"(?i)\b({_NAMES}\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s&;,'\"]+)")
# Up to the last @: who forgets to quote the special characters of a password has one in it.
_IN_TEXT = re.compile(r"(\w[\w+.-]*://[^\s:/@]*):\S*@")
_IN_VALUE = re.compile(r"^(\w[\w+.-]*://[^:/@]*|[^:/@]{2,}):(?!//).*@", re.DOTALL)
_NO_HOST = re.compile(r"(\w[\w+.-]*://[^\s:/@]*):(?!\d+(?:[/?,\s'\"]|$))[^\s/@'\"]+")  # what should be a port


def masked(value: Any) -> Any:
    """A setting's value with its passwords masked; one that has none comes back as it is.

    Passwords are in `scheme://user:PASSWORD@host`, and in `password=...` of a query or a list of words.
    """
    if not isinstance(value, str):
        return value
    return masked_text(_IN_VALUE.sub(rf"\1:{MASK}@", value))


def masked_text(text: str) -> str:
    """A message with the passwords of all addresses in it masked."""
    text = _IN_TEXT.sub(rf"\1:{MASK}@", text)
    return _ASSIGNED.sub(rf"\1{MASK}", _NO_HOST.sub(rf"\1:{MASK}", text))
