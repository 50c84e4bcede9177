"""Verbs that look at files and at the machine, and make no plan."""
