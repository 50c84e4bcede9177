"""The search for the best plan within a budget: integer programs decide and prove, walks look."""
