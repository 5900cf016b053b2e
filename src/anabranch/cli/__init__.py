"""The composition root: commands that wire the layers together."""
