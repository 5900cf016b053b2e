"""L1: the wire. `convert` alone touches both protobuf and core types."""
