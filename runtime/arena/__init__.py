"""Serving what runs again from one arena: a run is recorded, its blocks are laid out, and the next ones are served."""
