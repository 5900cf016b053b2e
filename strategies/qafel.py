"""QAFeL: FedBuff with a quantised uplink, and a hidden state that all devices share on the downlink.

| symbol | name        | meaning                                                                |
|--------|-------------|------------------------------------------------------------------------|
| K      | buffer_size | updates in a buffer                                                    |
| Q_c    | uplink_bits | quantiser of the devices: block integers with random rounding, unbiased |
| x^     |             | hidden state: what every device has, the replica of the delta log      |
| Q_s    |             | quantiser of x - x^: the delta log's                                   |

    x  <- x + eta_g (1/K) sum_i s(tau_i) Q_c(Delta_i)
    x^ <- x^ + Q_s(x - x^)

Without quantisers (`[uplink]` and `[downlink]` raw) it is FedBuff. The paper's Q_s is of 2 to 8 bits with
random rounding; ours rounds to a power-of-two grid with a dead zone, so that a device may skip messages
and take their sum. Source: Ortega and Jafarkhani, arXiv 2308.00263, checked against its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan
from anabranch.core.model.updates import Ask, LocalPlan
from anabranch.strategies.buffer import BufferState
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.parameters import Range


@dataclass(frozen=True)
class QAFeL(FedBuff):
    """FedBuff over a hidden state that all devices share, with both ways quantised.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "qafel"

    uplink_bits: Annotated[int, Range("be 4 or 8", lambda bits: bits in (4, 8))] = 4

    @property
    def uplink(self) -> str:
        """Q_c."""
        return f"int{self.uplink_bits}(256,sr)|zstd"

    def plan(self, state: BufferState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """The configured local training, its result through Q_c."""
        return Plan(state, local, uplink=self.uplink)

    def downlink(self, version: int) -> str:
        """The hidden state."""
        return "log(1)"
