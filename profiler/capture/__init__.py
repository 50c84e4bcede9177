"""One step as ops and values: what ran, how long it took, and when each value would die."""
