"""The search for the best plan within a budget."""
