"""The cockpit from outside: who comes in, by which name, and what a page of somebody else cannot do."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from cockpits import Browser, Printed, cockpit
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from nursery import COMMAND, run

from anabranch.cockpit.folder import RunFolder
from anabranch.cockpit.ordering import CONFIRM_S, Ordering
from anabranch.cockpit.runs import ShownRun
from anabranch.cockpit.visitors import SESSION_S, Visitor, Visitors
from anabranch.core.errors import NotPermitted
from anabranch.identity.certificates import certificate_pem, key_pem, new_key

PATHS = (
    *("/api/session", "/api/runs", "/api/runs/one", "/api/runs/one/series", "/api/runs/one/river"),
    *(
        "/api/runs/one/fleet",
        "/api/runs/one/devices/device-0000",
        "/api/runs/one/wire",
        "/api/runs/one/defence",
    ),
    *("/api/runs/one/server", "/api/runs/one/export", "/api/runs/one/stream", "/api/nothing", "/api/"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, and a secret beside it."""
    where: Path = tmp_path_factory.mktemp("place")
    small = ("--set", "run.workload=synthetic", "--set", "run.updates_max=20", "--set", "fleet.clients=2")
    done = run(COMMAND, "simulate", *small, "--out", "runs/one", "--json", cwd=where)
    assert done.returncode == 0, done.stderr
    shutil.copytree(where / "runs" / "one", where / "runs" / "two")
    shutil.copytree(where / "runs" / "one", where / "secret")
    return where / "runs"


@pytest.fixture(scope="module")
def printed(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    with cockpit(runs, cwd=tmp_path_factory.mktemp("cockpit")) as found:
        yield found


@pytest.fixture(scope="module")
def browser(printed: Printed) -> Browser:
    found = Browser(printed.next("cockpit")["link"])
    found.enter()
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cookie", ["", "NAME=guess", "NAME=", "other=1", "NAME=\x01;;"])
def test_nobody_gets_in_without_a_session(browser: Browser, path: str, cookie: str) -> None:
    stranger = Browser(browser.link, cookie=cookie.replace("NAME", browser.cookie.partition("=")[0]))
    for method in ("GET", "POST"):
        answer = stranger.ask(path, method)
        assert answer.status == 401, (method, path)
        assert "one-time link" in answer.json()["error"]


def test_a_link_is_used_up_and_the_next_one_is_printed(runs: Path, tmp_path: Path) -> None:
    with cockpit(runs, cwd=tmp_path) as said:
        first = Browser(said.next("cockpit")["link"])
        path = first.link.partition(first.host)[2]
        assert Browser(first.link).ask(path, "HEAD").status == 200  # who looks ahead uses nothing up
        assert first.enter().status == 303
        thief = Browser(first.link)
        assert (thief.enter().status, thief.cookie) == (403, "")
        second = Browser(said.next("cockpit", 1)["link"])
        assert second.link != first.link
        assert second.enter().status == 303
        assert {first.get("/api/session")["session"], second.get("/api/session")["session"]} == {1, 2}
        link = first.post("/api/links", None).json()["link"]
        phone = Browser(link)
        assert phone.enter().status == 303
        assert first.post("/api/logout", None).status == 200
        assert first.ask("/api/session").status == 401
        assert phone.ask("/api/session").status == 200
    assert first.link.partition("token=")[2] not in (tmp_path / "cockpit.log").read_text()


def test_a_guessed_link_opens_nothing(browser: Browser) -> None:
    for token in ("", "x", "a" * 43, browser.link.partition("token=")[2]):
        assert Browser(browser.link).ask(f"/login?token={token}").status == 403


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "127.0.0.2:{port}"),
        *("0.0.0.0:{port}", "localhost.evil.example", "[::2]:{port}", "evil@127.0.0.1:{port}"),
    ],
)
@pytest.mark.parametrize("path", ["/api/runs", "/", "/login?token=x"])
def test_another_name_is_refused(browser: Browser, host: str, path: str) -> None:
    port = browser.host.rpartition(":")[2]
    answer = browser.ask(path, Host=host.format(port=port))
    assert answer.status == 421
    assert "not called" in answer.json()["error"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LocalHost:{port}", "localhost", "[::1]:{port}"]
)
def test_its_own_names_are_not(browser: Browser, host: str) -> None:
    port = browser.host.rpartition(":")[2]
    secret = browser.cookie.partition("=")[2]
    cookies = f"{browser.cookie}; anabranch={secret}"  # without a port it is that of the address's own
    assert browser.ask("/api/runs", Host=host.format(port=port), Cookie=cookies).status == 200


def test_an_order_needs_the_sessions_own_word(browser: Browser, printed: Printed) -> None:
    other = Browser(printed.next("cockpit", 1)["link"])
    other.enter()
    for path in ("/api/runs/one/orders", "/api/links", "/api/logout"):
        for word in ("", "guess", other.csrf, browser.csrf[:-1]):
            answer = browser.post(path, {"order": "pause"}, **{"X-Anabranch": word})
            assert (answer.status, "X-Anabranch" in answer.json()["error"]) == (403, True)
        for origin in ("https://evil.example", "null", f"https://{browser.host}", "http://127.0.0.1:1"):
            assert browser.post(path, {"order": "pause"}, Origin=origin).status == 403
    own = f"http://{browser.host}"
    assert browser.post("/api/runs/one/orders", {"order": "pause"}, Origin=own).status == 400  # of a folder
    assert browser.ask("/api/session").status == 200


def test_cockpits_at_two_ports_of_a_machine_leave_each_other_their_sessions(
    runs: Path, tmp_path: Path
) -> None:
    """A jar of cookies knows no ports; and two that are called by tunnels may listen at the same one."""
    with cockpit(runs, cwd=tmp_path) as said, cockpit(runs, cwd=tmp_path) as other:
        links = [printed.next("cockpit")["link"] for printed in (said, other)]
        visitor = build_opener(HTTPCookieProcessor(CookieJar()))
        for link in links:
            visitor.open(link).close()
        for link in links:
            with visitor.open(urljoin(link, "/api/session")) as answer:
                assert answer.status == 200
        tunnelled = Browser(other.next("cockpit", 1)["link"])
        at = {"Host": "localhost:7080"}
        entered = tunnelled.ask(f"/login?{urlsplit(tunnelled.link).query}", **at)
        cookie, _, secret = (entered.headers["set-cookie"] or "").partition(";")[0].partition("=")
        assert cookie == "anabranch-7080"
        assert tunnelled.ask("/api/session", Cookie=f"{cookie}={secret}", **at).status == 200


def test_the_cookie_is_for_this_site_alone(runs: Path, tmp_path: Path) -> None:
    with cockpit(runs, cwd=tmp_path) as said:
        answer = Browser(said.next("cockpit")["link"]).enter()
    flags = {part.strip().lower() for part in (answer.headers["set-cookie"] or "").split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    assert not [flag for flag in flags if flag.startswith("domain")]
    assert answer.headers["location"] == "./"


def test_every_answer_has_the_policy(browser: Browser) -> None:
    answers = [
        browser.ask(path) for path in (*PATHS, "/", "/nothing.js", "/login?token=x") if "stream" not in path
    ]
    answers += [Browser(browser.link).ask("/api/runs"), browser.ask("/api/runs", Host="evil.example")]
    answers += [browser.ask("/api/runs", "DELETE"), browser.ask("/api/runs/one/fleet?sort=shoe")]
    answers += [browser.post("/api/runs/one/orders", {"order": "pause"}), browser.ask("/api/runs", "POST")]
    answers.append(Browser(browser.link).enter())
    assert {answer.status for answer in answers} >= {200, 400, 401, 403, 404, 421}
    for answer in answers:
        policy = answer.headers["content-security-policy"] or ""
        for rule in ("default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
    with browser.stream("one"):
        pass


@pytest.mark.parametrize(
    "name",
    [
        *(
            "..",
            ".",
            "..%2fsecret",
            "%2e%2e%2fsecret",
            "..%5csecret",
            "one%2f..%2f..%2fsecret",
            "%2fetc%2fpasswd",
        ),
        *("secret", "one%00", "", "..%252fsecret", "%2e%2e/secret"),
    ],
)
def test_no_path_comes_of_a_runs_name(browser: Browser, name: str) -> None:
    for rest in ("", "/export", "/fleet"):
        answer = browser.ask(f"/api/runs/{name}{rest}")
        assert answer.status in (400, 404), (name, rest, answer.body)
        assert b"rows" not in answer.body


@pytest.mark.parametrize(
    "path",
    [
        *("/../app.py", "/..%2fapp.py", "/%2e%2e/doorkeeper.py", "/static/../app.py", "//etc/passwd"),
        *("/%2fetc%2fpasswd", "/..%5capp.py", "/assets/..%2f..%2fapp.py"),
    ],
)
def test_no_file_but_its_own_is_handed_out(browser: Browser, path: str) -> None:
    answer = browser.ask(path)
    assert answer.status in (400, 404)
    assert b"import" not in answer.body
    assert b"root:" not in answer.body


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"[" * 60_000, b"\xff", b'{"order": %s}' % (b"9" * 5000)],
    ids=lambda b: b[:9].decode("latin1"),
)
def test_what_is_no_order_is_its_senders_fault(browser: Browser, body: bytes) -> None:
    answer = browser.post("/api/runs/one/orders", body)
    assert (answer.status, "an order is" in answer.json()["error"]) == (400, True)


def test_an_order_is_of_a_bounded_size(browser: Browser) -> None:
    path = "/api/runs/one/orders"
    assert browser.post(path, b" " * 70_000).status == 413
    assert (
        browser.ask(path, "POST", b"", **{"X-Anabranch": browser.csrf, "Content-Length": "x"}).status >= 400
    )
    host, port = browser.host.split(":")
    with socket.create_connection((host, int(port)), timeout=600) as line:  # says no length
        head = f"POST {path} HTTP/1.1\r\nHost: {browser.host}\r\nCookie: {browser.cookie}\r\n"
        head += f"X-Anabranch: {browser.csrf}\r\nTransfer-Encoding: chunked\r\n\r\n"
        line.sendall(head.encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")


@dataclass
class Noted:
    """A run whose orders are noted."""

    name: str
    given: list[str] = field(default_factory=list)

    def shown(self, folder: Path) -> ShownRun:
        """It, as the cockpit has it."""
        source: Any = RunFolder(folder, self.name)
        source.orders = self
        return ShownRun(self.name, source)

    def pause(self) -> None:
        """Note it."""
        self.given.append("pause")

    def rollback(self, to_version: int, without: Sequence[str], everyone: bool) -> tuple[int, int]:
        """Note it."""
        self.given.append(f"rollback {to_version} {without} {everyone}")
        return 1, 2


def test_a_confirmation_is_of_one_order_one_session_and_one_minute(runs: Path) -> None:
    now = [0.0]
    ordering, ann, bob = Ordering(lambda: now[0]), Visitor(1, "", 0.0), Visitor(2, "", 0.0)
    noted, others = Noted("one"), Noted("two")
    one, two = noted.shown(runs / "one"), others.shown(runs / "two")

    def token() -> str:
        return ordering.ask(one, ann, "pause", {})["confirm"]

    for run_, visitor in ((two, ann), (one, bob)):  # another run's, another's
        waits = token()
        with pytest.raises(NotPermitted):
            ordering.confirm(run_, visitor, waits)
        assert ordering.confirm(one, ann, waits) == {"done": "paused"}  # it was not used up by that
        with pytest.raises(NotPermitted):
            ordering.confirm(one, ann, waits)
    late = token()
    now[0] += CONFIRM_S
    with pytest.raises(NotPermitted):
        ordering.confirm(one, ann, late)
    with pytest.raises(NotPermitted):
        ordering.confirm(one, ann, "")
    assert (noted.given, others.given) == (["pause", "pause"], [])


def test_sessions_end() -> None:
    now = [0.0]
    visitors = Visitors(lambda: now[0])
    secret = visitors.enter(visitors.link())
    assert secret is not None
    now[0] = SESSION_S
    assert visitors.find(secret) is not None  # and begins anew with that
    now[0] += SESSION_S
    assert visitors.find(secret) is not None
    now[0] += SESSION_S + 1
    assert visitors.find(secret) is None
    many = [visitors.enter(visitors.link()) or "" for _ in range(100)]
    assert [bool(visitors.find(s)) for s in many] == [False] * 36 + [True] * 64


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate and key of it for `cockpit.example` at 127.0.0.1, and for a browser."""
    folder: Path = tmp_path_factory.mktemp("papers")
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    root_key, root = (
        new_key(),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")]),
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("cockpit.example"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    for name, of in (("root", None), ("cockpit", names), ("browser", names)):
        key = root_key if of is None else new_key()
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(root).public_key(key.public_key())
        made = (
            made.serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )
        made = made.add_extension(x509.BasicConstraints(of is None, None), critical=True)
        made = made if of is None else made.add_extension(of, critical=False)
        signed = made.sign(root_key, hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate_pem(signed))
        (folder / f"{name}.key").write_bytes(key_pem(key))
    return folder


def test_with_tls_the_cookie_is_for_tls_and_the_name_for_its_certificate(
    runs: Path, papers: Path, tmp_path: Path
) -> None:
    tls = ("--tls-certificate", papers / "cockpit.pem", "--tls-key", papers / "cockpit.key")
    trusting = ssl.create_default_context(cafile=str(papers / "root.pem"))
    trusting.verify_flags &= ~ssl.VERIFY_X509_STRICT
    everywhere = "[::]:0" if socket.has_dualstack_ipv6() else "0.0.0.0:0"  # both are all of this machine
    with cockpit(runs, *tls, cwd=tmp_path, listen=everywhere) as said:
        link = said.next("cockpit")["link"]
        assert link.startswith("https://cockpit.example:")
        browser = Browser(link.replace("cockpit.example", "127.0.0.1"), trusting)
        cookie = browser.enter().headers["set-cookie"] or ""
        port = urlsplit(link).port
        assert cookie.startswith(f"__Host-anabranch-{port}=")
        assert "Secure" in cookie
        assert browser.ask("/api/runs", Host=f"cockpit.example:{port}").status == 200
        assert browser.ask("/api/runs", Host="evil.example").status == 421
        with pytest.raises((ConnectionError, OSError)):
            Browser(link.replace("https", "http").replace("cockpit.example", "127.0.0.1")).ask("/")


def test_with_an_authority_a_browser_needs_a_certificate(runs: Path, papers: Path, tmp_path: Path) -> None:
    tls = ("--tls-certificate", papers / "cockpit.pem", "--tls-key", papers / "cockpit.key")
    nameless = ssl.create_default_context(cafile=str(papers / "root.pem"))
    nameless.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with cockpit(runs, *tls, "--tls-authority", papers / "root.pem", cwd=tmp_path) as said:
        link = said.next("cockpit")["link"].replace("cockpit.example", "127.0.0.1")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Browser(link, nameless).enter()
        known = ssl.create_default_context(cafile=str(papers / "root.pem"))
        known.verify_flags &= ~ssl.VERIFY_X509_STRICT
        known.load_cert_chain(papers / "browser.pem", papers / "browser.key")
        assert Browser(link, known).enter().status == 303


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--listen", "0.0.0.0:0"], "in the clear"),
        (["--listen", "192.0.2.1:7080"], "in the clear"),
        (["--listen", "7080"], "host:port"),
        (["--tls-key", "key.pem"], "--tls-certificate"),
        (["--tls-certificate", "no.pem", "--tls-key", "no.key"], "no.pem"),
    ],
)
def test_where_others_reach_it_it_wants_tls(runs: Path, tmp_path: Path, words: list[str], named: str) -> None:
    done = run(COMMAND, "ui", runs, *words, cwd=tmp_path)
    assert (done.returncode, named in done.stderr) == (2, True), done.stderr
