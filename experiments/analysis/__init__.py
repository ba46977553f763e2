"""Measurements of recorded gradients, next to the pictures of the papers that rely on them."""
