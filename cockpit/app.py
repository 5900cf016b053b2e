"""The application: which address answers what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from anabranch.cockpit.asking import Asked
from anabranch.cockpit.defence import defence
from anabranch.cockpit.doorkeeper import cookie_name, refused
from anabranch.cockpit.fleet import device, fleet
from anabranch.cockpit.news import News
from anabranch.cockpit.ordering import Ordering
from anabranch.cockpit.river import asked_river
from anabranch.cockpit.runs import NO_MEMORY, Runs, ShownRun, head_of, row_of
from anabranch.cockpit.series import series
from anabranch.cockpit.visitors import SESSION_S, Visitors
from anabranch.cockpit.wire import wire
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    DataError,
    IdentityError,
    ProtocolError,
    TooLarge,
    Unavailable,
    UnknownVersion,
)
from anabranch.reports.picture.picture import Picture

STATIC = Path(__file__).with_name("static")
STATUSES: dict[type[AnabranchError], int] = {
    ConfigError: 400,
    DataError: 404,
    UnknownVersion: 404,
    ProtocolError: 409,
    IdentityError: 403,
    Unavailable: 503,
}
CHUNK_BYTES = 1 << 18
# Of answers alone: a model does not become smaller, and news would wait for more of them.
SQUEEZED = [Middleware(GZipMiddleware, minimum_size=1024, compresslevel=3)]

Answer = Callable[[Request], Response]
View = Callable[[ShownRun, Picture, Request], Any]


class Cockpit:
    """What the routes stand on. `entered` is called when a link was used; `secure`: over TLS alone."""

    def __init__(
        self,
        runs: Runs,
        sessions: Visitors,
        secure: bool,
        entered: Callable[[], None],
        closing: Callable[[], bool],
    ) -> None:
        self.runs, self.sessions, self.secure = runs, sessions, secure
        self.ordering, self.news, self._entered = Ordering(), News(closing), entered

    def app(self) -> Starlette:
        """The application, without its guard."""
        one = "/api/runs/{run}"
        routes: list[BaseRoute] = [
            Route("/login", self._login),
            Route("/api/session", answering(self._session)),
            Route("/api/logout", answering(self._logout), methods=["POST"]),
            Route("/api/links", answering(self._link), methods=["POST"]),
            _told("/api/runs", self._list),
            _told(one, lambda request: head_of(self._run(request))),
            *(_told(f"{one}/{name}", partial(self._view, view)) for name, view in VIEWS.items()),
            _told(one + "/devices/{client:path}", partial(self._view, _device)),
            _told(one + "/server", self._server),
            Route(one + "/export", self._export),
            Route(one + "/stream", self._stream),
            Route(one + "/orders", self._order, methods=["POST"]),
        ]
        if (STATIC / "index.html").is_file():
            routes.append(Mount("/", StaticFiles(directory=STATIC, html=True)))
        app = Starlette(routes=routes, exception_handlers=HANDLERS)
        app.router.redirect_slashes = False
        return app

    # --- sessions ------------------------------------------------------------------------------

    def _login(self, request: Request) -> Response:
        if request.method == "HEAD":  # somebody looks ahead, who is not to use the link up
            return Response()
        secret = self.sessions.enter(request.query_params.get("token", ""))
        if secret is None:
            why = "this link was used, or is none: open the newest one that the cockpit has printed"
            return PlainTextResponse(why + "\n", 403)
        self._entered()
        answer = RedirectResponse("./", 303)  # below whatever path somebody in between has put it
        answer.set_cookie(
            self._cookie(request),
            secret,
            int(SESSION_S),
            path="/",
            secure=self.secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    def _session(self, request: Request) -> dict[str, Any]:
        runs = self.runs.all()
        operators = {self.runs.operator or "", *(run.source.operator for run in runs)} - {""}
        return {
            "csrf": request.state.session.csrf,
            "session": request.state.session.number,
            "operator": next(iter(operators), None),
            "orders": self.runs.operator is not None or any(run.source.orders is not None for run in runs),
            "runs": 1 if self.runs.single else "many",
        }

    def _logout(self, request: Request) -> dict[str, Any]:
        self.sessions.leave(request.cookies.get(self._cookie(request), ""))
        return {"done": "logged out"}

    def _cookie(self, request: Request) -> str:
        return cookie_name(request.headers.get("host", ""), self.secure)

    def _link(self, request: Request) -> dict[str, Any]:
        """For another device of whoever is here already."""
        base = str(request.base_url).rstrip("/")
        return {"link": f"{base}/login?token={self.sessions.link()}"}

    # --- runs ----------------------------------------------------------------------------------

    def _run(self, request: Request) -> ShownRun:
        return self.runs.get(request.path_params["run"])

    def _list(self, _: Request) -> dict[str, Any]:
        return {"runs": [row_of(run) for run in self.runs.all()]}

    def _view(self, view: View, request: Request) -> Any:
        run = self._run(request)
        picture = run.open()  # which may be none of the run's any more before the view is made
        with picture.lock:
            return view(run, picture, request)

    def _server(self, request: Request) -> dict[str, Any]:
        run = self._run(request)
        picture = run.open()
        found = run.source.server(picture)
        if found is None:
            raise DataError("this run has no server: it is read from a folder")
        return found

    def _export(self, request: Request) -> Response:
        text, held = request.query_params.get("version", ""), ExitStack()
        try:
            run = self._run(request)
            version = Asked({"version": text}).whole("version", 0, 0, 1 << 48) if text else None
            path = held.enter_context(run.source.export(version))
        except AnabranchError as error:
            return failed(error)

        def chunks() -> Iterator[bytes]:
            try:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            finally:
                held.close()

        which = "newest" if version is None else str(version)
        headers = {
            "content-disposition": f'attachment; filename="{run.id}-{which}.safetensors"',
            "content-length": str(path.stat().st_size),
        }
        return StreamingResponse(
            iterate_in_threadpool(chunks()), media_type="application/octet-stream", headers=headers
        )

    async def _stream(self, request: Request) -> Response:
        try:
            run = await run_in_threadpool(self._run, request)
            await run_in_threadpool(run.open)
        except AnabranchError as error:
            return failed(error)
        last_id = request.headers.get("last-event-id", request.query_params.get("after", ""))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            self.news.stream(run, last_id), media_type="text/event-stream", headers=headers
        )

    async def _order(self, request: Request) -> Response:
        body = await request.body()
        try:
            status, told = await run_in_threadpool(self._ordered, request, body)
        except AnabranchError as error:
            return failed(error)
        return JSONResponse(told, status)

    def _ordered(self, request: Request, body: bytes) -> tuple[int, dict[str, str]]:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            raise ConfigError("an order is JSON: {order, arguments}, then {confirm}") from None
        if not isinstance(said, dict) or ("confirm" in said) == ("order" in said):
            raise ConfigError("an order is {order, arguments}, and then {confirm}")
        run, session = self._run(request), request.state.session
        if "confirm" in said:
            return 200, self.ordering.confirm(run, session, str(said["confirm"]))
        arguments = said.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ConfigError("arguments: write an object")
        return 202, self.ordering.ask(run, session, str(said["order"]), arguments)


def _river(_: ShownRun, picture: Picture, request: Request) -> Any:
    return asked_river(picture, Asked(request.query_params))


def _series(_: ShownRun, picture: Picture, request: Request) -> Any:
    return series(picture, Asked(request.query_params))


def _fleet(run: ShownRun, picture: Picture, request: Request) -> Any:
    return fleet(picture, Asked(request.query_params), run.source.head().silence_s)


def _wire(_: ShownRun, picture: Picture, request: Request) -> Any:
    return wire(picture, Asked(request.query_params))


def _defence(run: ShownRun, picture: Picture, _: Request) -> Any:
    return defence(picture, run.source.head().config)


def _device(run: ShownRun, picture: Picture, request: Request) -> Any:
    return device(picture, request.path_params["client"], run.source.head().silence_s)


VIEWS = {"river": _river, "series": _series, "fleet": _fleet, "wire": _wire, "defence": _defence}


def answering(view: Callable[[Request], Any]) -> Answer:
    """A view as a route: its answer as JSON, the errors of the tree as theirs. Runs in a thread."""

    def answer(request: Request) -> Response:
        try:
            return JSONResponse(view(request))
        except AnabranchError as error:
            return failed(error)

    return answer


def _told(path: str, view: Callable[[Request], Any]) -> Route:
    """The route of what a page asks for again and again, compressed where the browser takes that."""
    return Route(path, answering(view), middleware=SQUEEZED)


def failed(error: AnabranchError) -> JSONResponse:
    """An error of the tree as an answer."""
    found = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    return refused(found, str(error))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refused(error.status_code, error.detail)


async def _no_memory(_: Request, __: Exception) -> Response:
    return failed(TooLarge(NO_MEMORY))


async def _bug(_: Request, error: Exception) -> Response:
    return refused(500, f"the cockpit failed: {type(error).__name__}; its log has more")


HANDLERS = {HTTPException: _http_error, MemoryError: _no_memory, Exception: _bug}
