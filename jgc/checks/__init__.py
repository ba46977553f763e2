"""Errors and warnings for mistakes in arguments and states: each names what is wrong and what would
be right."""
