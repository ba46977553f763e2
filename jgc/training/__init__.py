"""Training: configuration, the step, the loop, checkpoints, and what a run leaves behind.

`train.py` calls `jgc.training.cli.main`. The one linear read is `jgc.training.loop.run`.
"""
