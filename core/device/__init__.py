"""The device's machine: what it asks, trains and pushes, and what it does when that fails."""
