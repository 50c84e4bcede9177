"""Compiled regions in an eager model: their backwards ask for each saved tensor where they first need it."""
