"""Checks of the machine, or of all processes of a run: `python -m jgc doctor`."""
