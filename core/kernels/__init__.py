"""Loops over values: numpy's (`plain`), the same compiled (`compiled`), and which of them runs (`chosen`).

`descent` is no such loop: it trains a model where it is compiled, and torch does elsewhere.
"""
