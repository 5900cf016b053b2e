"""The composition root: commands that wire the layers together."""

import os

# gRPC reads it when it is imported. Else each stranger's broken handshake is a line in the server's log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
