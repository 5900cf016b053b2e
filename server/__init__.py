"""L2: the gRPC server. `app.serve` runs it."""
