"""L2: the device agent."""
