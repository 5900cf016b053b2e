"""L3: the fleet simulator, on a virtual clock."""
