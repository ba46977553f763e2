"""The loops of a user: `make_step` and `local_steps`, their state, and how to save it."""
