"""quickstart-torch: a Flower / PyTorch app."""
