"""The step as plain arrays, and the simulator: memory and time of a schedule."""
