"""Benchmarks that a user can run: `python -m jgc bench --help`."""
