"""Codes for values and positions, message sizes, and the bytes of a compiled program's collectives."""
