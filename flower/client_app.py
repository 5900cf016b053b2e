"""What `anabranch flower pack --set uplink.codec=...` puts in the place of a ClientApp: the same, compressed.

[tool.flwr.app.components]
clientapp = "anabranch.flower.client_app:app"

[tool.flwr.app.config.anabranch]
clientapp = "quickstart.client_app:app"          # the app's own
"""

from __future__ import annotations

from anabranch.core.errors import AppError
from anabranch.flower.compression import compressed_uplink
from anabranch.flower.installed import flwr_version

flwr_version()

from flwr.app import Context, Message  # noqa: E402 - the environment is set by then
from flwr.clientapp import ClientApp  # noqa: E402

from anabranch.flower.project import load  # noqa: E402

KEY = "anabranch.clientapp"


class CompressedApp(ClientApp):
    """The ClientApp that the run config names, with `compressed_uplink` around all of it."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Raises `AppError` where none is named."""
        reference = str(context.run_config.get(KEY, ""))
        theirs = load(reference)
        if not isinstance(theirs, ClientApp):
            raise AppError(f"{KEY}: {reference!r} is a {type(theirs).__name__}, no ClientApp")
        return compressed_uplink(message, context, theirs)


app = CompressedApp()
