"""`python -m jgc rounds`: look at a bucket, close a round and clean up by hand, and a demonstration."""
