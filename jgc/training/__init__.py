"""Training: configuration, the step, the loop, checkpoints, and what a run leaves behind.

`train.py` calls `jgc.training.settings.cli.main`. Start reading at `jgc.training.run.loop`.
"""
