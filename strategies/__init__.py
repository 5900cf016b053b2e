"""L1, pure: one paper, one file. `registry.make(name, params)` builds a strategy."""
