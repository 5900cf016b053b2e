"""What stands round the engine, whoever runs it: no clock, no I/O, no threads."""
