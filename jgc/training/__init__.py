"""Training: configuration, the step, the loop, checkpoints, and what a run leaves behind.

`train.py` calls `jgc.training.cli.main`. Start reading at `jgc.training.loop`.
"""
