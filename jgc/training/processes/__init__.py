"""Runs of several processes: start, agreement and end."""
