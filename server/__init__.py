"""L3: the gRPC server. `app.serve` runs it."""
