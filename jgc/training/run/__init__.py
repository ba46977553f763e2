"""A run: its set-up, its loop, its folder and its checkpoints."""
