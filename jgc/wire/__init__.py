"""Codes of values and positions, message sizes, and bytes of a compiled program's collectives."""
