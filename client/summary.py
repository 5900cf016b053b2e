"""What an agent has done."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.client.messages import PushAnswer
from anabranch.client.outbox import UpdateEntry
from anabranch.core.model.updates import Verdict


@dataclass
class AgentSummary:
    """What an agent has done when it ends, and `why` it ended: because its run is over, or another reason."""

    client_id: str
    why: str = ""
    run_ended: bool = False
    answered: int = 0
    applied: int = 0
    rejected: int = 0
    failures: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes_raw: int = 0
    downlink_bytes_full_equivalent: int = 0
    training_s: float = 0.0

    def refused(self) -> None:
        """Count an update with a flaw, which is answered by an error."""
        self.answered += 1
        self.rejected += 1

    def pushed(self, entry: UpdateEntry, answer: PushAnswer, value_bytes: int) -> None:
        """Count an answered update; a value of it is `value_bytes` long without compression."""
        rejected = answer.decision.verdict is Verdict.REJECTED
        self.answered += 1
        self.rejected += rejected
        self.applied += not rejected
        self.uplink_bytes += len(entry.payload)
        self.uplink_bytes_raw += entry.values * value_bytes
