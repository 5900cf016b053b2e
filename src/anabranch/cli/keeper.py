"""`keeper`: the process of somebody else than the server's, which takes the masks off sums of updates."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.logs import LogLevel, set_up_logging
from anabranch.cli.options import AsJson
from anabranch.cli.output import Output
from anabranch.cli.starter import UntilEof, stop_at_eof
from anabranch.core.errors import ConfigError, Unavailable, disk_error
from anabranch.reports.text import count_text

if TYPE_CHECKING:
    from anabranch.keeper.papers import KeeperPapers
    from anabranch.keeper.store import KeeperStore

keeper_app = typer.Typer(
    help="Take masks off sums of updates, as another party than the server's.", no_args_is_help=True
)

KEEPER_FOLDER = Path("anabranch-keeper")

Folder = Annotated[Path, typer.Option("--folder", help="The keeper's files.", metavar="DIR")]
Ca = Annotated[
    Path,
    typer.Option("--ca", help="The certificate of the authority of the devices, PEM.", metavar="FILE"),
]


@keeper_app.command("init")
def init(
    ca: Ca,
    folder: Folder = KEEPER_FOLDER,
    cohort_min: Annotated[
        int, typer.Option("--cohort-min", help="The fewest devices in a sum, whatever the server says.")
    ] = 8,
    noise_min: Annotated[
        float, typer.Option("--noise-min", help="The least noise of a sum, in clips; 0: none is needed.")
    ] = 0.0,
    epsilon_max: Annotated[
        float,
        typer.Option("--epsilon-max", help="The most that all sums of a device may come to; 0: anything."),
    ] = 0.0,
    delta: Annotated[float, typer.Option("--delta", help="At which that is counted.")] = 1e-6,
    as_json: AsJson = False,
) -> None:
    """Make a keeper's keys, and print its name: what devices and the server are told."""
    from anabranch.keeper.papers import Floors, make_papers

    try:
        authority = ca.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"--ca {ca} is not there: it is ca.pem in the authority's folder") from None
    except OSError as error:
        raise disk_error(ca, error) from error
    floors = Floors(cohort_min, noise_min, epsilon_max, delta)
    papers = make_papers(folder, authority, floors, time.time())
    text = f"{folder}: keep it from the server's people, and put no older copy of it back\n{_text(papers)}"
    Output(as_json).result({"folder": str(folder), **_facts(papers)}, text)


@keeper_app.command("show")
def show(folder: Folder = KEEPER_FOLDER, as_json: AsJson = False) -> None:
    """Its name, what it insists on, and how much it has unmasked."""
    papers, store = _opened(folder)
    try:
        runs, cohorts, updates = store.counts()
    finally:
        store.close()
    done = {"runs": runs, "cohorts": cohorts, "updates": updates}
    text = f"{_text(papers)}\nunmasked: {count_text(cohorts)} cohorts of {count_text(updates)} updates"
    Output(as_json).result({**_facts(papers), **done}, text)


@keeper_app.command("health")
def health(
    address: Annotated[
        str, typer.Argument(help="Where it should serve.", metavar="HOST:PORT")
    ] = "127.0.0.1:7075",
    folder: Folder = KEEPER_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Ask the keeper of this folder whether it serves; exit code 0 if it does."""
    from anabranch.keeper.papers import read_papers
    from anabranch.keeper.serving import serves

    if not serves(read_papers(folder), address):
        raise Unavailable(f"the keeper of {folder} does not serve at {address}")
    Output(as_json).result({"serving": True}, "serving")


@keeper_app.command("serve")
def serve(
    folder: Folder = KEEPER_FOLDER,
    listen: Annotated[
        str, typer.Option("--listen", help="Where the server finds it.", metavar="HOST:PORT")
    ] = "127.0.0.1:7075",
    until_eof: UntilEof = False,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Unmask cohorts until SIGTERM, with a line for each."""
    from anabranch.core.secagg.cohort import Cohort
    from anabranch.keeper import serving
    from anabranch.keeper.keeper import Keeper, Unmasked
    from anabranch.keeper.rules import Declined

    set_up_logging(as_json, log_level)
    output = Output(as_json, serves=True)
    papers, store = _opened(folder)
    stop = threading.Event()
    if until_eof:
        stop_at_eof(stop.set)

    def ready(address: str) -> None:
        output.event("serving", f"keeper {papers.name} on {address}", address=address, keeper=papers.name)

    def told(cohort: Cohort, found: Unmasked | Declined) -> None:
        facts = {"run_id": cohort.run_id, "number": cohort.number, "updates": len(cohort.members)}
        line = f"run {cohort.run_id}, cohort {cohort.number} of {count_text(len(cohort.members))} updates"
        if isinstance(found, Declined):
            text = f"{line}: refused, {found.why.value}: {found.detail}"
            output.event("refused", text, **facts, reason=found.why.value, detail=found.detail)
        else:
            again = " again" if found.again else ""
            output.event("answered", f"{line}: answered{again}", **facts, again=found.again)

    try:
        asyncio.run(serving.serve(Keeper(papers, store, time.time), listen, ready, told, stop))
    finally:
        store.close()
    output.event("stopped", "stopped")


def _opened(folder: Path) -> tuple[KeeperPapers, KeeperStore]:
    """The keeper of a folder. Raises `ConfigError`, `StoreError`."""
    from anabranch.keeper.papers import read_papers
    from anabranch.keeper.store import open_memory

    papers = read_papers(folder)
    return papers, open_memory(papers)


def _facts(papers: KeeperPapers) -> dict[str, Any]:
    from anabranch.identity.certificates import fingerprint

    return {
        "keeper": papers.name,
        "ca_sha256": fingerprint(papers.authority),
        "cohort_min": papers.floors.cohort_min,
        "noise_min": papers.floors.noise_min,
        "epsilon_max": papers.floors.epsilon_max,
        "delta": papers.floors.delta,
    }


def _text(papers: KeeperPapers) -> str:
    facts = _facts(papers)
    return (
        f"keeper: {facts['keeper']}\nauthority: {facts['ca_sha256']}\n"
        f"a sum needs: {facts['cohort_min']} devices, noise of {facts['noise_min']:g} clips"
        + (
            f"\nepsilon: {most:g} at most, at delta {facts['delta']:g}"
            if (most := facts["epsilon_max"])
            else ""
        )
    )
