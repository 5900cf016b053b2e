"""The tables of a configuration, and what they may hold."""
