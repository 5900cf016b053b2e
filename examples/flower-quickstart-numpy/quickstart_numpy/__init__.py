"""quickstart-numpy: a Flower app."""
