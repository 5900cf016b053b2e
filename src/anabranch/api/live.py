"""`Server`: a federation's server in this process; with a network, or without one (`Server.local`)."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from anabranch.api.background import Background
from anabranch.api.listening import Listening
from anabranch.api.objects import RunObjects, Source, plan_run
from anabranch.api.operated import Operated, first_model, run_of_data
from anabranch.api.run import Run
from anabranch.api.temporary import folder_at
from anabranch.client.local import LocalServer
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, NotAuthenticated, Unavailable
from anabranch.core.spelling import spelled

ANY_PORT = "127.0.0.1:0"
OTHERS_S = 1.0  # so often it is asked whether devices of other processes have come
LOOK_S = 0.02  # so often it is looked whether a run without a network, or a device of this process, has ended


class DevicesHere:
    """The devices of this process that work for a server of it; those that have ended well are forgotten."""

    def __init__(self) -> None:
        self._devices: list[Background] = []

    def __len__(self) -> int:
        return len(self._devices)

    def add(self, device: Background) -> None:
        """One begins to work."""
        self._devices = [*(d for d in self._devices if not d.ended_well), device]

    def wait(
        self,
        over: Callable[[float], bool],
        timeout_s: float | None,
        has_others: Callable[[], bool] | None,
    ) -> None:
        """Until a run is `over` within some seconds. `has_others`: None where there can be none.

        Raises what has ended one of the devices, once all of them have ended and nobody else is there, or
        when the time is up; `Unavailable` where the time is up and none has failed, or where there is no
        such time, all have ended well and there can be no others.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        asked_at = -math.inf
        while not over(max(0.0, min(LOOK_S, until - time.monotonic()))):
            now, alone, devices = time.monotonic(), False, self._devices
            if devices and all(d.over for d in devices) and now >= asked_at + OTHERS_S:
                asked_at, alone = now, has_others is None or not has_others()
            if alone or now >= until:
                for device in (d for d in devices if d.over):
                    device.wait()
            if now >= until:
                raise Unavailable(f"the run has not ended within {timeout_s:g} s")
            # Looked at once more: the end of the run may be what they ended at.
            if alone and has_others is None and timeout_s is None and not over(0.0):
                raise Unavailable(
                    "the run has not ended, and all of its devices have: start others before wait(), or give "
                    "them more tasks (Client(tasks_max=...))"
                )


class Server(Listening, Operated):
    """Serves a run while its context lasts: `with Server(app, until=Until(updates=100)) as server: ...`.

    The server is that of `anabranch server`, in a thread. `source` and the objects are those of `simulate`,
    from `strategy` to `settings`; what is of simulations alone says nothing here, and a run without an end is
    served until it is stopped.
    `address` and `admin_address` (of operators): on loopback, on ports that are free, unless they are given.
    Other machines are served with mutual TLS, by the authority in `identity.folder`; `insecure`: in the
    clear. `data_dir`: where its data lies, and from where a run goes on; None: in a temporary folder.
    `bundle`: a file from which devices may have the App (`make_bundle`). Raises
    `ConfigError` and `AppError`, and when it starts `PortInUse` and the errors of its store.
    """

    @spelled(RunObjects)
    def __init__(
        self,
        source: Source,
        *,
        address: str = ANY_PORT,
        admin_address: str = ANY_PORT,
        data_dir: str | Path | None = None,
        insecure: bool = False,
        bundle: str | Path | None = None,
        **objects: Unpack[RunObjects],
    ) -> None:
        super().__init__("anabranch-server")
        named = None if data_dir is None else Path(data_dir).absolute()  # before an App moves elsewhere
        plan = plan_run(source, objects, ends=False)
        self.data_dir, self._temporary = folder_at(named)
        where = str(self.data_dir / "data")
        table = replace(plan.config.server, address=address, admin_address=admin_address, data_dir=where)
        self.config: Config = replace(plan.config, server=table)
        self._app = plan.load_app()
        self._insecure, self._bundle = insecure, None if bundle is None else Path(bundle)
        self._over = threading.Event()
        self._devices = DevicesHere()

    @staticmethod
    @spelled(RunObjects)
    def local(source: Source, **objects: Unpack[RunObjects]) -> InProcessServer:
        """A server without a network, for devices in this process: `Client(app, server)`.

        What devices are told, and what comes of their updates, is what a live server does. It has no disk, so
        it ends with its process. `source` and the objects are as for `Server`.
        """
        return InProcessServer(source, **objects)

    @property
    def insecure(self) -> bool:
        """See `Operated`."""
        return self._insecure

    @property
    def run_id(self) -> str:
        """The run's own name, which no other run has."""
        return str(self._served.run_id)

    def has_device(self, device: Background) -> None:
        """See `Operated`."""
        self._devices.add(device)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until its run has ended: the server goes on serving the last version.

        Raises what stopped it, and what ended a device of this process: once all of them have ended where the
        run has no others, else when the time is up. `ConfigError` where it has not begun.
        """
        self._check_begun()
        self._devices.wait(self._over.wait, timeout_s, self._has_others)
        self._raise()

    def _has_others(self) -> bool:
        """Whether devices of other processes have come; where an operator alone may ask, some may have."""
        try:
            return self.status().clients > len(self._devices)
        except (NotAuthenticated, Unavailable):
            return True

    def report(self, out: str | Path | None = None) -> Run:
        """The run, once the server has stopped: its figures and its models from its log alone.

        `out`: the folder to write; None: in the data's own. Raises `ConfigError` where it holds a run.
        """
        if self._thread.is_alive():
            raise ConfigError("the server is running: leave its context, or call stop(), before report()")
        table = self.config.server
        return run_of_data(Path(table.data_dir), table.database, self._app, out, self._temporary)

    def _over_now(self) -> None:
        self._over.set()

    async def _serve(self, stop: asyncio.Event) -> None:
        from anabranch.server.app import serve

        await serve(
            self.config,
            first_model(self._app, self.config, self.data_dir / "model"),
            ready=self._serving,
            stop=stop,
            insecure=self._insecure,
            bundle=self._bundle,
            ended=lambda _: self._over.set(),
            reopened=self._over.clear,
        )


class InProcessServer(Background):
    """See `Server.local`. `local` is the server itself: its engine, its journal, orders of operators."""

    def __init__(self, source: Source, **objects: Unpack[RunObjects]) -> None:
        super().__init__("anabranch-local-server")
        plan = plan_run(source, objects, ends=False)
        app = plan.load_app()
        self.config = plan.config
        self.local = LocalServer.of(app, plan.config)
        self._over = threading.Event()
        self._devices = DevicesHere()

    def has_device(self, device: Background) -> None:
        """See `Operated`."""
        self._devices.add(device)

    def wait(self, timeout_s: float | None = None) -> None:
        """As `Server.wait`; without a time, `Unavailable` also where all devices have ended before the run.

        Devices of other processes there are none, so it would wait for ever.
        """
        self._check_begun()
        self._devices.wait(self._ended_within, timeout_s, None)
        self._raise()

    def _ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self.over or bool(self.local.engine.finished)

    def weights(self) -> Mapping[str, Any]:
        """The newest version of the model: numpy arrays by name."""
        return self.local.model()

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self.local.engine.version

    def _work(self) -> None:
        while not (self._over.wait(LOOK_S) or self.local.engine.finished):
            self.local.tick()  # leases end though nobody calls

    def _end(self) -> None:
        self._over.set()
