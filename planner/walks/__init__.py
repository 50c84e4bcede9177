"""Walks through decisions, in the compiled evaluator: annealing and descent, and the best plans they met."""
