"""What operators see and do of masked sums: in `admin status`, and `admin secagg`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli.operating import operates
from anabranch.cli.output import Output
from anabranch.core.errors import ConfigError
from anabranch.reports.text import count_text

if TYPE_CHECKING:
    from anabranch.client.operator import KeeperStanding, MaskedSums, OperatorClient

secagg_app = typer.Typer(help="The masked sums of a run.", no_args_is_help=True)
SHORT = 12  # digits of a keeper's name, for readers


@secagg_app.command("drop")
@operates
def drop(
    server: OperatorClient,
    output: Output,
    number: Annotated[int | None, typer.Argument(help="The sum's, as `admin status` has it.", min=1)] = None,
    why: Annotated[str, typer.Option(help="For the record.")] = "",
    of: Annotated[
        str, typer.Option(help="Instead: quarantine this device, and drop every sum with an update of it.")
    ] = "",
) -> None:
    """Wait no more for a sum that a keeper will not unmask: its updates are lost, later sums go on."""
    if (number is None) == (not of):
        raise ConfigError("name one sum by its number, or all of a device with --of DEVICE")
    if number is None:
        numbers, lost = server.drop_sums_of(of, why)
        told = ", ".join(map(str, numbers)) or "none"
        output.result(
            {"client_id": of, "numbers": numbers, "updates_lost": lost},
            f"{of} is quarantined, sums dropped: {told}, {count_text(lost)} updates lost",
        )
        return
    lost = server.drop_sum(number, why)
    output.result(
        {"number": number, "updates_lost": lost}, f"sum {number} is dropped, {count_text(lost)} updates lost"
    )


def masked_lines(sums: MaskedSums) -> Iterator[str]:
    """How they stand, for readers."""
    gathered = f"{count_text(sums.gathered)} updates gathered"
    lost = f", {count_text(sums.lost)} were lost" if sums.lost else ""
    yield f"masked sums: {gathered}, {len(sums.waiting)} sums wait for keepers{lost}"
    for first in sums.waiting[:1]:
        yield f"  the next: sum {first.number}, of {first.updates} updates, since version {first.version}"
    for keeper in sums.keepers:
        yield f"  keeper {_who(keeper)}: {keeper.trouble or f'{count_text(keeper.answered)} sums answered'}"


def _who(keeper: KeeperStanding) -> str:
    return f"{keeper.address} ({keeper.name[:SHORT]})" if keeper.name else keeper.address
