"""The mark of fields that were not always there, by itself: a check of health reads limits, and no arrays."""

from __future__ import annotations

# The metadata of such a field: it is not written where it is as by default.
LATER_KEY = {"later": True}
