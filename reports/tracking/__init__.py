"""Trackers of libraries of others, each a file that is imported only when it is named."""
