"""The values that a node sends: the largest of each layer or of every chunk, and positions."""
