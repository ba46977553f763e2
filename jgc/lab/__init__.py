"""The experiments: `python -m jgc --help` lists their commands.

Imports go one way: commands -> advise -> bench, analysis, plan and report, which do not import each other -> launch
-> shared.
"""
