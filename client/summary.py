"""What an agent has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AgentSummary:
    """What an agent has done when it ends, and `why` it ended."""

    client_id: str
    why: str = ""
    answered: int = 0
    applied: int = 0
    rejected: int = 0
    failures: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes_raw: int = 0
    downlink_bytes_full_equivalent: int = 0
    training_s: float = 0.0
