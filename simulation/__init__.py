"""L2: the fleet simulator, on a virtual clock."""
