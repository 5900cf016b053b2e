"""A Flower app whose devices send back what they get: what a task costs besides training."""
