"""Masked sums with keepers: integers of a ring, the terms of a run, what a keeper is asked."""
