"""A device's way to its servers: plain on its own machine, else mutual TLS; it renews its certificate."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from anabranch.client.channel import (
    CONNECT_S,
    CONNECT_S_MAX,
    CONTROL_S,
    RECONNECT_MAX_S,
    mapped_errors,
    open_channel,
)
from anabranch.client.clocks import check_unreached
from anabranch.client.servers import Servers
from anabranch.client.tracing import traced
from anabranch.core.errors import AnabranchError, ClocksDisagree, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.identity.certificates import (
    SET_CLOCK,
    TOLD_BEFORE_S,
    Kind,
    lifetime,
    new_papers,
    papers_of_next,
    time_text,
)
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between two attempts to renew, less for certificates of a short life
RETRIES_MIN = 20
TELL_S = 86400.0  # between two warnings of the authority's end
DISAGREED_RETRY_S = 3600.0  # the most, where clocks disagree: the server signs and keeps each in vain
ROUND_TRIPS = 4  # of connecting: TCP's, and TLS's three


class Link:
    """Gives the stub of the moment, to any thread: of the server that serves, with the newest certificate.

    `addresses`: see `Servers`. `now` is a clock of seconds since 1970.
    """

    def __init__(
        self,
        addresses: str,
        limits: Limits = DEFAULT_LIMITS,
        reconnect_max_s: float = RECONNECT_MAX_S,
        wallet: Wallet | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.wallet = wallet
        self._limits, self._reconnect_max_s, self._now = limits, reconnect_max_s, now
        self._lock = threading.Lock()
        self._not_before = self._tell_not_before = 0.0
        self._disagreed_s = 0.0  # between the two newest attempts, where the clocks disagreed
        # Its own: a certificate is renewed under the other, by a call that may take longer to connect.
        self._connecting = threading.Lock()
        self._connect_s = CONNECT_S
        self.servers = Servers(addresses, self._connect)

    def close(self) -> None:
        """Cut off whatever is under way."""
        self.servers.close()

    @property
    def address(self) -> str:
        """Where calls go."""
        return self.servers.current.address

    def stub(self) -> DevicesStub:
        """The calls. Renews the certificate when it is due. Raises `NotAuthenticated` once it has expired."""
        if self.wallet is not None:
            with self._lock:
                now = self._now()
                self._tell_end(self.wallet, now)
                if self.wallet.is_due(now) and now >= self._not_before:
                    self._renew(self.wallet, now)
                self.wallet.check(now)
        return self.servers.current.stub

    @contextmanager
    def calling(self, first: bool = False) -> Iterator[None]:
        """Inside, what gRPC raises becomes an error of the tree; if nobody answers, a lookout begins.

        The `first` call finds out whether it was made in the clear to a server that wants a certificate.
        """
        server, began_at = self.servers.current, time.monotonic()
        try:
            with mapped_errors(server.address, plain=first and self.wallet is None):
                yield
            self.servers.answered(server)
            self._allow_less(time.monotonic() - began_at)
        except Unavailable as error:
            self.servers.failed(server)  # first: once there is a new connection, it is another's failure
            if not error.reached:
                self._allow_more(time.monotonic() - began_at)
            check_unreached(error, server.address, self.wallet, self._now())
            raise
        except ClocksDisagree as error:
            if SET_CLOCK in str(error):  # by a call within this one, as a download makes
                raise
            here = time_text(self._now())
            raise ClocksDisagree(f"{error}, by this machine's {here}: {SET_CLOCK}") from error

    def _connect(self, address: str) -> grpc.Channel:
        channel = open_channel(
            address, self._limits, self._reconnect_max_s, self.wallet, connect_s=self._connect_s
        )
        return traced(channel)

    def _allow_more(self, took_s: float) -> None:
        """Where all the time to connect was too short, as over a satellite: it is twice as long from now."""
        with self._connecting:
            if took_s < self._connect_s or self._connect_s >= CONNECT_S_MAX:
                return
            self._connect_s = min(2 * self._connect_s, CONNECT_S_MAX)
        self.servers.reconnect()

    def _allow_less(self, took_s: float) -> None:
        """An answer takes a round trip at least: where it came soon, a host was gone, not the link long."""
        with self._connecting:
            self._connect_s = min(self._connect_s, max(CONNECT_S, ROUND_TRIPS * took_s))

    def _tell_end(self, wallet: Wallet, now: float) -> None:
        """Of the authority, once a day in its last half-year: nobody renews it."""
        end = lifetime(wallet.authority)[1]
        if end - TOLD_BEFORE_S < now < end and now >= self._tell_not_before:
            self._tell_not_before = now + TELL_S
            papers = papers_of_next(wallet.peer.kind)
            log.warning("the federation's authority ends on %s: before then, %s", time_text(end), papers)

    def _renew(self, wallet: Wallet, now: float) -> None:
        """Get a newer certificate; what fails is tried again later, the old one still counts for a while.

        An operator's, as evaluators have, no server renews: it is said once when it ends.
        """
        begin, end = lifetime(wallet.certificate)
        if (peer := wallet.peer).kind is Kind.OPERATOR:
            self._not_before = math.inf
            until = f"the certificate of operator {peer.name!r} counts until {time_text(end)}"
            log.warning("%s, and no server renews it: before then, %s", until, new_papers(peer.kind))
            return
        retry_s = min(RETRY_S, (end - begin) / RETRIES_MIN)
        self._not_before = now + retry_s
        request = devices.RenewCertificateRequest(signing_request=wallet.request())
        try:
            with self.calling():
                answer = self.servers.current.stub.RenewCertificate(request, timeout=CONTROL_S)
            self.wallet = wallet.renewed(answer.certificate, now)
        except AnabranchError as error:
            if isinstance(error, ClocksDisagree):
                most_s = min(DISAGREED_RETRY_S, (end - begin) / RETRIES_MIN)
                self._disagreed_s = min(max(retry_s, 2 * self._disagreed_s), most_s)
                self._not_before = now + self._disagreed_s
            log.warning("the certificate was not renewed, it is tried again: %s", error)
            return
        self._disagreed_s = 0.0
        log.info("the certificate was renewed")
        self.servers.reconnect()
