"""Limits on everything, in one file. Units last in every name.

`Limits` travels with the configuration, so tests may shrink a cap and operators may raise one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.core.later import LATER_KEY

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Of a device: results that wait for the server. At the caps training waits, or the oldest makes room.
OUTBOX_ENTRIES_MAX = 64
OUTBOX_BYTES_MAX = 2 * GIB
# Of masked updates: one alone would hide nothing.
COHORT_MIN = 2
# Of a masked sum, as keepers take it: a run of larger ones is refused, as nobody would ever answer it.
COHORT_MAX, COHORT_BYTES_MAX = 10_000, 48 * MIB
COHORT_MEMBER_BYTES_MAX = 32 * KIB
# Of a client at a server: updates on their way, and what has come of those that were cut.
UPLOAD_BYTES_PER_CLIENT = 2 * GIB
# A chunk that goes over most links in time, and that every release takes.
CHUNK_BYTES = 256 * KIB
# Over those where one of that size has not come through: 1 KiB a second will do, as sides wait for 30 s.
SLOW_CHUNK_BYTES = 16 * KIB
# Of a bundle of an App: code and small files. More is neither made, served nor opened.
BUNDLE_BYTES_MAX = 16 * MIB
BUNDLE_MANIFEST_BYTES_MAX = 1 * MIB
BUNDLE_FILES_MAX = 1_000
# A server with a full disk looks again after so long.
RETRY_FULL_DISK_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Caps of one server. The comment says what happens at the cap."""

    # --- the wire
    message_bytes_max: int = 1 * MIB + 64 * KIB  # gRPC refuses the message
    metadata_bytes_max: int = 8 * KIB
    chunk_bytes_max: int = 1 * MIB  # TooLarge
    payload_bytes_max: int = 1 * GIB  # TooLarge, before the first byte is spooled
    # ConfigError at `init` and at a start: the frozen tensors that travel apart
    frozen_bytes_max: int = field(default=2 * GIB, metadata=LATER_KEY)
    manifest_bytes_max: int = 1 * MIB  # TooLarge
    id_chars_max: int = 64  # InvalidUpdate: ids are short and of a strict alphabet
    # InvalidUpdate: finite values whose weighted sum would not be finite any more
    examples_max: int = 10**9
    delta_abs_max: float = 1e12
    upload_idle_s: float = 30.0  # a stalled upload is cut; what is spooled stays for a resume
    upload_yields_s: float = 5.0  # so is one so far behind a slow link, as soon as another wants its place
    handshake_s: float = 10.0  # a connection that does not begin to speak HTTP/2 is closed
    # --- concurrency
    uploads_inflight_max: int = 48  # of more than `inline_bytes_max`: Overloaded with a retry window
    uploads_inflight_bytes_max: int = 512 * MIB  # of all, by what they declare: Overloaded
    connections_max: int = 10_000  # fewer where the system allows fewer open files; more are closed at once
    streams_max: int = 100  # calls at a time of one connection; more wait at the device
    rpcs_max: int = 1_000  # gRPC refuses the call, RESOURCE_EXHAUSTED
    member_calls_max: int = field(default=32, metadata=LATER_KEY)  # of one certificate at a time: Overloaded
    rpcs_waiting_max: int = 2_000  # of each call, those not begun: gRPC ends more without a word, CANCELLED
    joins_at_once_max: int = 64  # gRPC refuses the call, which is made again
    join_connection_s_max: float = 10.0  # whoever calls the join port and sends nothing is cut off
    join_failures_per_minute: float = 30.0  # Overloaded: who fails more often is not listened to
    queue_events_max: int = 1_024  # Overloaded
    calls_per_minute: float = 6_000.0  # Overloaded: of each call and each client; as many may come at once
    early_calls_at_once: int = 20  # inside a wait that was told, of each client: more are answered late
    capabilities_per_hour: float = 12.0  # Overloaded: who says other things of itself more often
    # --- the engine
    receipts_max: int = 100_000  # oldest receipts leave memory; the store keeps them all
    clients_max: int = 1_000_000
    waiting_max: int = 10_000  # devices whose turn for a place is kept; more are refused as they come
    # --- the store
    inline_bytes_max: int = 1 * MIB  # larger payloads are spooled and become files of their own
    commit_events_max: int = 64  # events in one group commit
    commit_wait_s: float = 0.002  # how long a group commit waits for company
    free_disk_bytes_min: int = 64 * MIB  # below: StoreFull, nothing is acknowledged

    @property
    def sent_chunk_bytes(self) -> int:
        """Of a chunk that a server sends over a link of which it knows nothing: see `CHUNK_BYTES`."""
        return min(CHUNK_BYTES, self.chunk_bytes_max)

    @property
    def slow_chunk_bytes(self) -> int:
        """Of a chunk over a link that is too slow for those: see `SLOW_CHUNK_BYTES`."""
        return min(SLOW_CHUNK_BYTES, self.chunk_bytes_max)


DEFAULT_LIMITS = Limits()
