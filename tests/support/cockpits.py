"""A browser for the cockpit, as small as it can be: an address, a cookie, JSON, and a stream of events."""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from nursery import COMMAND, PIPE, Process, run

SMALL = (
    *("run.workload=synthetic", "fleet.clients=6", "fleet.examples_per_client=40", "run.updates_max=120"),
    *("uplink.codec=topk(0.1)|int8", "fleet.dropout=0.1"),
)


class Answer(NamedTuple):
    """What the cockpit answered."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


@dataclass
class Browser:
    """Of one person. `link` is the one-time link; `enter` opens it."""

    link: str
    tls: ssl.SSLContext | None = None
    cookie: str = ""
    csrf: str = ""
    host: str = field(init=False)

    def __post_init__(self) -> None:
        self.host = urlsplit(self.link).netloc

    def enter(self) -> Answer:
        """Open the link, and keep the cookie."""
        parts = urlsplit(self.link)
        answer = self.ask(f"{parts.path}?{parts.query}")
        self.cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
        if self.cookie:
            self.csrf = self.get("/api/session")["csrf"]
        return answer

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        """A request, with what a browser sends along; other headers replace those."""
        line = self._line()
        try:
            self._send(line, method, path, body, headers)
            answer = line.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            line.close()

    def get(self, path: str, **parameters: object) -> Any:
        """The JSON of an answer that is one."""
        answer = self.ask(f"{path}?{urlencode(parameters)}" if parameters else path)
        assert answer.status == 200, (path, answer.status, answer.body)
        return answer.json()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """An order, with the session's word."""
        return self.ask(path, "POST", body, **{"X-Anabranch": self.csrf, **headers})

    def order(self, run: str, name: str, **arguments: Any) -> Answer:
        """An order, asked and confirmed."""
        asked = self.post(f"/api/runs/{run}/orders", {"order": name, "arguments": arguments})
        assert asked.status == 202, asked.body
        return self.post(f"/api/runs/{run}/orders", {"confirm": asked.json()["confirm"]})

    @contextmanager
    def stream(self, run: str, after: str = "") -> Iterator[Iterator[tuple[str, str, Any]]]:
        """The messages of a run's stream: (event, id, data)."""
        line = self._line()
        headers = {"Last-Event-ID": after} if after else {}
        self._send(line, "GET", f"/api/runs/{run}/stream", None, headers)
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield _messages(answer)
        finally:
            answer.close()
            line.close()

    def _line(self) -> http.client.HTTPConnection:
        if self.tls is not None:
            return http.client.HTTPSConnection(self.host, timeout=600, context=self.tls)
        return http.client.HTTPConnection(self.host, timeout=600)

    def _send(
        self, line: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> None:
        line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Host": self.host, "Cookie": self.cookie}
        own |= {"Content-Length": str(len(data))} if method == "POST" else {}
        for name, value in {**own, **headers}.items():
            if value:
                line.putheader(name, value)
        line.endheaders(data or None)


def _messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    while line := answer.readline():
        name, colon, value = line.decode().rstrip("\n").partition(":")
        if colon and name:
            fields[name] = value.strip()
        elif not name and not colon and "event" in fields:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = {}


class Printed:
    """What a command prints, line by line, read all the time, so that it never waits."""

    def __init__(self, process: Process) -> None:
        self._lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._over = False
        assert process.stdout is not None
        self._file = process.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, kind: str, number: int = 0) -> dict[str, Any]:
        """The line of a kind, the first one or a later one."""
        with self._news:
            while len(found := [line for line in self._lines if line.get("kind") == kind]) <= number:
                assert not self._over, f"it has ended without a line of kind {kind}: {self._lines}"
                self._news.wait()
            return found[number]

    def _read(self) -> None:
        for text in self._file:
            with self._news:
                self._lines.append(json.loads(text))
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


@contextmanager
def cockpit(
    *words: object, cwd: Path, listen: str = "127.0.0.1:0", by: signal.Signals = signal.SIGTERM
) -> Iterator[Printed]:
    """`anabranch ui` with these words, on a port that is free; it ends well."""
    with (cwd / "cockpit.log").open("wb") as log:
        command = (COMMAND, "ui", *words, "--listen", listen, "--json")
        with Process(*command, cwd=cwd, stdout=PIPE, stderr=log) as process:
            printed = Printed(process)
            yield printed
            process.send_signal(by)
            assert process.wait(600) == 0, (cwd / "cockpit.log").read_text()


def simulated(where: Path, *settings: str) -> Path:
    """The folder of a simulated run of these settings."""
    words = [word for setting in settings for word in ("--set", setting)]
    done = run(COMMAND, "simulate", *words, "--out", "run", "--json", cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "run"


@contextmanager
def entered(*words: object, cwd: Path) -> Iterator[Browser]:
    """Somebody who has opened the link of `anabranch ui`."""
    with cockpit(*words, cwd=cwd) as printed:
        browser = Browser(printed.next("cockpit")["link"])
        browser.enter()
        yield browser
