"""Graph mode in one call: compiles a model with a plan's replays and points in its code, and returns its session."""
