"""The arena: every strategy in every cell, tuned by the same budget, compared on fresh paired seeds."""
