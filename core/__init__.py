"""L0, pure: the machines and the data they speak. No clock, randomness, I/O, threads or framework."""
