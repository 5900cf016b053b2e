"""The walks: one file for each page, one for kinds of people, one for exit codes."""

from walking import Walk

from walks import (
    background_push,
    bundles,
    cockpit,
    deploying,
    exit_codes,
    extending,
    federation,
    flower,
    jobs,
    moving,
    new_project,
    observability,
    operators,
    own_app,
    people,
    privacy,
    protocol,
    readme,
    results,
    robust,
    simulator,
    strategies,
    systems,
    trackers,
    tuning,
)

ALL: tuple[Walk, ...] = tuple(
    walk
    for source in (
        readme,
        federation,
        deploying,
        robust,
        privacy,
        background_push,
        simulator,
        results,
        tuning,
        strategies,
        systems,
        protocol,
        flower,
        moving,
        own_app,
        new_project,
        extending,
        people,
        observability,
        cockpit,
        trackers,
        jobs,
        bundles,
        operators,
        exit_codes,
    )
    for walk in source.WALKS
)

# Exit codes that no walk ends with, and why.
NEVER: dict[int, str] = {
    1: "a bug: a walk fails at the first traceback",
    10: "on the wire alone: no command of ours sends what a server refuses",
    12: "on the wire alone: a device gives the task back",
    13: "of two sides that do not have the same stages: a device gives the task back",
    14: "on the wire alone: a server takes no update that is not signed by its device",
    20: "on the wire alone: a device drops the result, and asks anew",
    22: "on the wire alone: a device is told that the run has ended, and ends with 0",
    23: "on the wire alone: a device comes again later",
    25: "on the wire alone: a device gives the update up",
    53: "of a wrong clock, which no walk sets: tests/security/test_clocks.py",
}
