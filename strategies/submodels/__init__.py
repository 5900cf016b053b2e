"""Planners: who trains which part of the model."""
