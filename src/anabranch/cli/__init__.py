"""The composition root: commands that wire the layers together."""

import os

# gRPC reads it when it is imported. Else its C core writes lines of its own among ours; what it has to say
# comes as the status of a call as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
