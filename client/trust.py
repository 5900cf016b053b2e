"""Which keepers a device believes: those that its own people have told it, never those of a server alone.

What a mask is worth hangs on who can take it off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.core.errors import ConfigError, NotAuthenticated
from anabranch.core.limits import COHORT_MIN
from anabranch.identity.keepers import Masking

_NAME = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class KeeperTrust:
    """What a device insists on. `keepers`: their names, sorted; with none it masks nothing.

    `cohort_min`: its update is one of so many in a sum, or more.
    """

    keepers: tuple[str, ...] = ()
    cohort_min: int = COHORT_MIN

    def check(self, masking: Masking | None, size: int) -> None:
        """Raises `ConfigError` and `NotAuthenticated` unless a run of `size` values is as this device wants.

        One that names keepers never sends in the clear, whatever a server says.
        """
        if masking is None:
            if self.keepers:
                raise NotAuthenticated(
                    "this device was told keepers, and the server's run has no masked sums: nothing is sent "
                    "in the clear; leave --keeper out where that is meant"
                )
            return
        terms = masking.terms
        if not self.keepers:
            raise ConfigError(
                f"the run's sums are unmasked by {' and '.join(terms.keepers)}: get the keepers' names from "
                "whoever runs them, not from the server, compare, and say each with --keeper"
            )
        if self.keepers != terms.keepers:
            raise NotAuthenticated(
                f"the run's keepers are {', '.join(terms.keepers)}, and this device was told "
                f"{', '.join(self.keepers)}: it masks for these alone"
            )
        terms.check()
        if not terms.plan:
            raise NotAuthenticated(
                "the run was begun by an older release, whose boxes say too little: its server could read "
                "single updates in its sums. Begin another run from its model (`anabranch admin export`), or "
                "let devices of that older release end it"
            )
        if terms.size != size:
            raise NotAuthenticated(f"the run's terms are of {terms.size} values, and its model has {size}")
        if terms.cohort_min < self.cohort_min:
            raise NotAuthenticated(
                f"the run's sums are of {terms.cohort_min} updates or more, and this device wants "
                f"{self.cohort_min}: see --cohort-min"
            )
        keys = masking.by_name
        for keeper in terms.keepers:
            if keeper not in keys:
                raise NotAuthenticated(f"the server does not say what key keeper {keeper} has")
            keys[keeper].check(keeper)


def trusted(keepers: Sequence[str], cohort_min: int = COHORT_MIN) -> KeeperTrust:
    """Of what a person has said. Raises `ConfigError` for what is no keeper's name."""
    if isinstance(keepers, str):  # each of its letters would be one
        raise ConfigError(f"keepers is the text {keepers!r}: give a list of names")
    for keeper in keepers:
        if not _NAME.fullmatch(keeper):
            raise ConfigError(
                f"keeper {keeper!r}: a name is 64 hexadecimal digits, as `anabranch keeper show` prints it"
            )
    return KeeperTrust(tuple(sorted(set(keepers))), cohort_min)
