"""The commands of `python -m jgc`; `python -m jgc --help` lists them.

Imports go one way: commands -> advise -> bench, plan and report, which do not import each other -> launch -> shared.
"""
