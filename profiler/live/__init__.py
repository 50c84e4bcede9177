"""Profiles a step where it happens: in the user's own loop, nothing run twice, nothing restored."""
