"""Integrations: training libraries with loops of their own. Each is imported in its own module here, nowhere else."""
