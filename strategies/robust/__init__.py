"""Rules that replace the mean of a buffer of updates, of which some may be hostile."""
