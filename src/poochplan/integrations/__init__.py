"""Integrations with training libraries. Only the module for a library imports it."""
