"""The search for the best plan within a budget: integer programs prove bounds and give starts, walks improve plans."""
