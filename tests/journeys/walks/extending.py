"""docs/extending: every kind of part, in the run that its page begins with it."""

from signal import SIGINT

import numpy as np
from safetensors.numpy import load_file
from walking import End, Look, Step, Walk, Walker, Write, also, also_starts, starts, types

SIMULATED = "anabranch simulate "
STRATEGY = "anabranch simulate synthetic --updates 40 --strategy examples/extending/"
SERVER = "STORE_FOLDER=elsewhere anabranch server"
ENDING_SERVER = "anabranch server --model model --set run.updates_max=4 --set strategy.buffer_size=2"
VERIFIED = "STORE_FOLDER=elsewhere anabranch verify"


def the_tracker_was_told(walker: Walker) -> None:
    """What it writes lies beside the result."""
    (told,) = (walker.folder / "runs").glob("*/metrics.csv")
    assert "accuracy=" in told.read_text()


def the_log_lies_elsewhere(walker: Walker) -> None:
    """Where the store says, and not in the data directory."""
    assert (walker.folder / "elsewhere" / "anabranch.db").is_file()
    assert not (walker.folder / "anabranch-data" / "anabranch.db").exists()


SPARSE, SPARSE_SERVER = "examples/nm_sparse.py:SparseDigits", "anabranch server --model sparse"
SPARSE_DEVICE = f"anabranch client {SPARSE} --id device-0"


def two_of_four_are_used(walker: Walker) -> None:
    """In every row of the weights, by fours."""
    for name, tensor in load_file(walker.folder / "sparse.safetensors").items():
        if name.endswith("weight"):
            assert (np.count_nonzero(tensor.reshape(-1, 4), axis=1) == 2).all()


def page(part: str, *steps: Step, needs: str = "server") -> Walk:
    """The walk of one page."""
    return Walk(
        f"one's own {part}",
        page=f"docs/extending/{part.replace(' ', '-')}.md",
        needs=needs,
        copies=("examples",),
        steps=steps,
    )


WALKS = (
    page(
        "app",
        types("anabranch check", says=""),
        types(f"{SIMULATED}examples/extending", says="loss"),
        types(f"{SIMULATED}{SPARSE}", says=r"accuracy 9\d\."),
        types(f"anabranch init {SPARSE}"),
        starts(SPARSE_SERVER, until="serving"),
        starts(SPARSE_DEVICE, until="pushed"),
        types("anabranch admin export sparse.safetensors", says="sparse.safetensors"),
        Look(two_of_four_are_used),
        End(SPARSE_DEVICE, by=SIGINT),
        End(SPARSE_SERVER, by=SIGINT, says="drained"),
        needs="all",
    ),
    page("attack", types(SIMULATED, says="40 updates")),
    page("executor", types(SIMULATED, says="40 updates")),
    page("planner", types(SIMULATED, says="40 updates"), needs="all"),
    page("robust rule", types(SIMULATED, says="40 updates")),
    page("scheduler", types(SIMULATED, says="40 updates")),
    page("split", types(SIMULATED, says="40 updates"), needs="all"),
    page("stage", types(SIMULATED, says="40 updates")),
    page("staleness", types(SIMULATED, says="40 updates")),
    page(
        "strategy",
        types(f"{STRATEGY}composition.py", says="40 updates"),
        types(f"{STRATEGY}strategy.py", says="examples/extending/strategy.py:WarmUp on synthetic"),
    ),
    page(
        "tracker",
        types(SIMULATED, says="40 updates"),
        Look(the_tracker_was_told),
        types("anabranch report", fills={"RUN": "$(ls -d runs/*)"}, says="report: "),
    ),
    page(
        "store",
        types("anabranch init", says="anabranch server"),
        starts(SERVER, until="serving"),
        also("anabranch client synthetic --id device-0 --tasks-max 2", says="2 tasks done"),
        End(SERVER, by=SIGINT, says="drained"),
        types(VERIFIED, says="sound"),
        Look(the_log_lies_elsewhere),
    ),
    page(
        "transport",
        also("anabranch init synthetic --out model", says="anabranch server"),
        Write("address", "127.0.0.1:7070\n"),
        also_starts(ENDING_SERVER, until="serving"),
        types("anabranch client", says="4 updates answered"),
        End(ENDING_SERVER, by=SIGINT, says="drained"),
    ),
)
