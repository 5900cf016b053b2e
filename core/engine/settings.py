"""The part of a configuration that the server machine obeys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from anabranch.core.config.tables import Config
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.chains import AUTO
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rules import NEWEST
from anabranch.core.secagg.ring import chain_of


@dataclass(frozen=True)
class EngineSettings:
    """Zero means no bound. Times in seconds, the retry window as (earliest, latest).

    `uplink`: the codec chain of updates; `auto` leaves it to the strategy. `any_submodel`: an update may
    cover another part of the model than its task, which is for those who aggregate by hand. `admits_all`: who
    asks gets a task, which is for a fold of a log in which that was decided. From `clip` on:
    `clipping.py` and `guard.py`; `auto` leaves the clip to the strategy. `buffers`: see `buffers.py`.
    `participations_max`: updates of one client in the whole run, which is private then; it ends when its
    `fleet` is there and can give no more. `cohorts_waiting_max`: of masked sums, while as many wait for their
    keepers nobody gets a task. `rules`: see `core/rules.py`.
    """

    seed: int = 0
    concurrency: int = 0
    staleness_max: int = 0
    lease_s: float = 60.0
    lease_min_s: float = 10.0
    lease_max_s: float = 3600.0
    tasks_per_client: int = 1
    tenure_leases: float = 5.0
    retry_after_s: tuple[float, float] = (0.5, 2.0)
    versions_max: int = 0
    updates_max: int = 0
    receipts_max: int = DEFAULT_LIMITS.receipts_max
    local: LocalPlan = field(default_factory=LocalPlan)
    uplink: str = AUTO
    any_submodel: bool = False
    admits_all: bool = False
    clip: float | str = AUTO
    buffer_max: int = 0
    window_max: int = 0
    window_versions: int = 20
    tasks_per_minute: float = 0.0
    flaws_max: int = 0
    rejections_max: int = 0
    buffers: str = "average"
    upload_now_versions: int = 0
    participations_max: int = 0
    fleet: int = 0
    cohorts_waiting_max: int = 0
    rules: int = NEWEST

    def lease_of(self, task_s_ewma: float | None) -> float:
        """Seconds of the lease of a client with this mean task time, None where that is not known."""
        if task_s_ewma is None:
            return self.lease_s
        return min(max(3.0 * task_s_ewma, self.lease_min_s), self.lease_max_s)

    def spent(self, version: int, applied: int) -> str:
        """Why a run with this version and so many applied updates has ended; empty while it goes on."""
        if self.versions_max and version >= self.versions_max:
            return f"the run ended at version {version}, its budget"
        if self.updates_max and applied >= self.updates_max:
            return f"the run ended after {applied} updates, its budget"
        return ""

    @classmethod
    def of(cls, config: Config, limits: Limits | None = None) -> EngineSettings:
        """The settings of a configuration; `limits` stand in for its own."""
        server, run, client, robust = config.server, config.run, config.client, config.robust
        made = cls(
            seed=run.seed,
            concurrency=server.concurrency,
            staleness_max=server.staleness_max,
            lease_s=server.lease_s,
            lease_min_s=server.lease_min_s,
            lease_max_s=server.lease_max_s,
            tasks_per_client=server.tasks_per_client,
            tenure_leases=server.tenure_leases,
            retry_after_s=(server.retry_after_min_s, server.retry_after_max_s),
            versions_max=run.versions_max,
            updates_max=run.updates_max,
            receipts_max=(limits or config.limits).receipts_max,
            local=LocalPlan(
                epochs=client.epochs,
                steps=client.steps,
                batch_size=client.batch_size,
                learning_rate=client.learning_rate,
                momentum=client.momentum,
                weight_decay=client.weight_decay,
            ),
            uplink=config.uplink.codec,
            clip=robust.clip,
            buffer_max=robust.buffer_max,
            window_max=robust.window_max,
            window_versions=robust.window_versions,
            tasks_per_minute=robust.tasks_per_minute,
            flaws_max=robust.flaws_max,
            rejections_max=run.rejections_max,
            buffers=config.model.buffers,
            upload_now_versions=server.upload_now_versions,
            rules=run.rules,
        )
        made = made.privately(config) if config.privacy.on else made
        return made.masked(config) if config.secagg.on else made

    def privately(self, config: Config) -> EngineSettings:
        """With what `[privacy]` has in the place of `[robust]`: who is heard how often, whatever it sends."""
        privacy = config.privacy
        apart = privacy.separation - 1
        return replace(
            self,
            clip=0.0,
            buffer_max=1,
            window_max=1 if apart else 0,
            window_versions=max(apart, 1),
            flaws_max=0,
            participations_max=privacy.participations,
            fleet=config.fleet.clients,
        )

    def masked(self, config: Config) -> EngineSettings:
        """With what `[secagg]` has in the place of other tables: a device is once in a sum."""
        secagg = config.secagg
        return replace(
            self,
            uplink=chain_of(secagg.bits, secagg.value_bits),
            clip=0.0,
            buffer_max=1,
            cohorts_waiting_max=secagg.cohorts_waiting_max,
        )
