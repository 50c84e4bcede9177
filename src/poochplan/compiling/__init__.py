"""Graph mode in one call: a model compiled with a plan's replays and points in its code, and the plan itself."""
