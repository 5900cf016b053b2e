"""What stands before every request: by which name the cockpit was called, who calls, what browsers may do.

The name is checked so that no page of somebody else, whose name is made to lead here, reads what is here.
An order needs the session's own word in a header, which only a page of the cockpit itself can read and send.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.cockpit.visitors import Visitor, Visitors

COOKIE, SECURE_COOKIE = "anabranch", "__Host-anabranch"
CSRF = "x-anabranch"
BODY_BYTES_MAX = 1 << 16
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Doorkeeper:
    """Around the application. `hosts`: the names by which it may be called."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], sessions: Visitors, secure: bool) -> None:
        self._app, self._hosts, self._sessions, self._secure = app, frozenset(hosts), sessions, secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":  # no websockets, and nothing to be done at the start
            return

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if scope["path"].startswith(("/api/", "/login")):
                    headers["cache-control"] = "no-store"
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_with)
        else:
            await self._app(scope, receive, send_with)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = host_of(headers.get("host", ""))
        if host not in self._hosts:
            return refused(421, f"the cockpit is not called {host!r}: open the address that it has printed")
        if not scope["path"].startswith("/api/"):
            return None
        session = self._session(headers)
        if session is None:
            return refused(
                401, "nobody has logged in here: open the one-time link that the cockpit has printed"
            )
        scope["state"] = {"session": session}
        if scope["method"] in ("GET", "HEAD"):
            return None
        return self._order_refusal(headers, session, scope)

    def _order_refusal(self, headers: Headers, session: Visitor, scope: Scope) -> JSONResponse | None:
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{headers.get('host', '')}":
            return refused(403, "an order from a page of somebody else is not taken")
        if not hmac.compare_digest(headers.get(CSRF, "").encode(), session.csrf.encode()):
            return refused(403, "an order needs the header X-Anabranch with the csrf of /api/session")
        length = headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            return refused(413, f"an order says its length, of at most {BODY_BYTES_MAX} bytes")
        return None

    def _session(self, headers: Headers) -> Visitor | None:
        name = cookie_name(headers.get("host", ""), self._secure)
        secret = cookie_of(headers.get("cookie", ""), name)
        return self._sessions.find(secret) if secret else None


def host_of(header: str) -> str:
    """The name in a `Host` header, without its port and brackets."""
    name = header.rpartition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.strip("[]").lower()


def cookie_name(host: str, secure: bool) -> str:
    """That of the session of a page which has this `Host`.

    Browsers keep one set of cookies for all ports of a machine, and each may have a cockpit: so the port is
    in the name, as the browser has it, to whom that of a tunnel's or a container's other end says nothing.
    """
    name, port = SECURE_COOKIE if secure else COOKIE, host.rpartition(":")[2]
    return f"{name}-{port}" if port.isdecimal() and ":" in host else name


def cookie_of(header: str, name: str) -> str:
    """A cookie of a request, empty where there is none."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def refused(status: int, why: str) -> JSONResponse:
    """An error as every answer has it."""
    return JSONResponse({"error": why}, status)
