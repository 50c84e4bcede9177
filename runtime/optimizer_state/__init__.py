"""Optimizer state in the host tier: where it is between steps, and how optimizers step in chunks."""
