"""Loops over values: numpy's (`plain`), the same compiled (`compiled`), and which of them runs (`chosen`)."""
