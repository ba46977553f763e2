"""Faults against real runs of several processes: `python -m jgc chaos`."""
