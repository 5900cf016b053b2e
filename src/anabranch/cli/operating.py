"""The one way in which a command speaks to the operators' port, and the options for it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from anabranch.cli.options import AsJson, Identity, Insecure
from anabranch.cli.output import Output
from anabranch.core.errors import Unavailable

if TYPE_CHECKING:
    from anabranch.client.operator import OperatorClient

P = ParamSpec("P")

ADMIN_ADDRESS = "127.0.0.1:7071"
Admin = Annotated[str, typer.Option("--admin", help="The operators' address.", metavar="HOST:PORT")]
NOBODY = "a server that is ready says `serving` and its operators' address, which --admin HOST:PORT names"

CONNECTION: dict[str, tuple[Any, Any]] = {  # parameter: (annotation, default)
    "admin": (Admin, ADMIN_ADDRESS),
    "identity": (Identity, None),
    "insecure": (Insecure, False),
    "as_json": (AsJson, False),
}


def operates(command: Callable[Concatenate[OperatorClient, Output, P], None]) -> Callable[..., None]:
    """A command of a server's operators: it is handed the connected client and its voice.

    Its own parameters follow those two. The options that say which server, who asks and how to answer are
    added here, so that no such command can be without them.
    """
    hints = typing.get_type_hints(command, localns={"OperatorClient": Any}, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[2:]
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=hint)
        for name, (hint, default) in CONNECTION.items()
    ]

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        from anabranch.client.operator import open_operator, operator_wallet

        admin, identity, insecure, as_json = (given.pop(name) for name in CONNECTION)
        with open_operator(admin, operator_wallet(identity), insecure) as client:
            try:
                command(client, Output(as_json), *args, **given)
            except Unavailable as error:
                if error.reached:
                    raise
                raise Unavailable(f"{error}; {NOBODY}") from error

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
