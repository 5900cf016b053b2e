"""A device's connection: plain on its own machine, else mutual TLS with a certificate that it renews."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import grpc

from anabranch.client.channel import CONTROL_S, RECONNECT_MAX_S, mapped_errors, open_channel
from anabranch.core.errors import AnabranchError
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.identity.certificates import lifetime
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between two attempts to renew, less for certificates of a short life
RETRIES_MIN = 20


class Link:
    """Gives the stub of the moment, to any thread. `now` is a clock of seconds since 1970."""

    def __init__(
        self,
        address: str,
        limits: Limits = DEFAULT_LIMITS,
        reconnect_max_s: float = RECONNECT_MAX_S,
        wallet: Wallet | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.address, self.wallet = address, wallet
        self._limits, self._reconnect_max_s, self._now = limits, reconnect_max_s, now
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._former: grpc.Channel | None = None
        self._open()

    def close(self) -> None:
        """Cut off whatever is under way."""
        for channel in (self._former, self._channel):
            if channel is not None:
                channel.close()

    def stub(self) -> DevicesStub:
        """The calls. Renews the certificate when it is due. Raises `NotAuthenticated` once it has expired."""
        if self.wallet is None:
            return self._stub
        with self._lock:
            now = self._now()
            if self.wallet.is_due(now) and now >= self._not_before:
                self._renew(now)
            self.wallet.check(now)
            return self._stub

    def _open(self) -> None:
        self._channel = open_channel(self.address, self._limits, self._reconnect_max_s, self.wallet)
        self._stub = DevicesStub(self._channel)

    def _renew(self, now: float) -> None:
        """Get a newer certificate; what fails is tried again later, the old one still counts for a while."""
        assert self.wallet is not None
        begin, end = lifetime(self.wallet.certificate)
        self._not_before = now + min(RETRY_S, (end - begin) / RETRIES_MIN)
        try:
            request = devices.RenewCertificateRequest(signing_request=self.wallet.request())
            with mapped_errors(self.address):
                answer = self._stub.RenewCertificate(request, timeout=CONTROL_S)
            self.wallet = self.wallet.renewed(answer.certificate)
        except AnabranchError as error:
            log.warning("the certificate was not renewed, it is tried again: %s", error)
            return
        log.info("the certificate was renewed")
        # Another thread may have a call under way: what it goes over is closed the next time.
        if self._former is not None:
            self._former.close()
        self._former = self._channel
        self._open()
