"""The node axis: how nodes lie on devices, functions that run on it, node-local gradients, and
where arrays lie."""
