"""The compiled programs of a run: training steps, evaluation, diagnosis, and the bytes that they send."""
