"""Checks of arguments and states: each message names the bad value and what would be right."""
