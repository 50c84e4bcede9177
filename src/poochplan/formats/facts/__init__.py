"""Facts about how a step was run when it was profiled, and what they advise."""
