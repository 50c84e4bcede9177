"""The engine: what happens to each saved value, at the points of the plan's clock."""
