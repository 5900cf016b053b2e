"""Named moments between the steps of the acknowledgement protocol, at which a test may end the process.

`docs/durability.md` has the steps. Nothing happens at a failpoint unless `arm` was called, which no part of
the server does: the tests kill a real process at each of them, and what was acknowledged must survive.
"""

from __future__ import annotations

from collections.abc import Callable

# In the order in which an update meets them; those of a payload are for one that is not inline.
POINTS = (
    "upload_begun",  # the header is checked, the upload has its place
    "chunk_written",  # bytes are in the spool
    "upload_whole",  # all bytes are
    "payload_sealed",  # their digest is right
    "payload_synced",  # the file is on the disk, in the spool
    "payload_renamed",  # it has its name as a blob
    "payload_durable",  # and its folder is on the disk
    "update_checked",  # the values are good; not in the writer's queue yet
    "batch_taken",  # the writer has it in hand
    "log_written",  # its batch is in the log's file, and not on the disk
    "log_flushed",  # it is on the disk; the engine has not had it
    "handled",  # the engine has folded it
    "marked",  # how far the log has come is written a second time
    "answers_ready",  # the whole batch is handled; nobody has heard of it
    "answered",  # the acknowledgements are on their way
    "rows_begun",  # later: the rows of many events are to be written; PostgreSQL's at once, in place of a log
    "rows_written",  # those of events and updates are in the transaction
    "projections_written",  # so is what they have come to; nothing is committed
    "committed",  # the rows have all of it
    "snapshot_written",  # the file of a snapshot is on the disk
    "snapshot_named",  # the database knows it
    "snapshots_cleared",  # and older ones are gone
)
# Beside those, where a strategy's memory of devices lies on the disk.
SHELF_POINTS = (
    "shelf_written",  # what a device's update is remembered by is in a file, perhaps not on the disk
    "shelf_flushed",  # the rows of a snapshot are on the disk, the snapshot is not
    "shelf_cleared",  # rows that nothing refers to any more are gone
)
# Where it lies in a database.
SHARED_SHELF_POINTS = ("shelf_put",)  # some rows are there, those of other statements are not
# And where updates are masked.
MASKED_POINTS = ("sum_came",)  # a keeper has answered; the log does not have it

_hook: Callable[[str], None] | None = None


def arm(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called with the name of every failpoint reached, in whatever thread; None: no more."""
    global _hook  # noqa: PLW0603 - one process, one set of failpoints
    _hook = hook


def reach(name: str) -> None:
    """This moment has come."""
    if _hook is not None:
        _hook(name)
