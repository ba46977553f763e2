"""Experiments behind pages of docs/results. They need a clone: `pip install jgc` does not bring them.

`python -m experiments --help` lists their commands. jgc imports nothing from here.
"""
