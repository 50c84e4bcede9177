"""Passes without gradients that an arena serves."""
