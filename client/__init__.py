"""L3: the device agent."""
