"""Measurements of recorded gradients, beside the pictures of the papers that rely on them."""
