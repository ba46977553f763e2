"""Helpers of several experiments: timing, recording, tables, pictures, pages, and names on the command line."""
