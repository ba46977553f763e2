"""The node axis: layouts, functions that run on it, node-local gradients, placements of arrays."""
