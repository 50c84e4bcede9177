"""Profiling a forward pass alone."""
