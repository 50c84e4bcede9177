"""The step as plain arrays, and the referee: what a schedule does to its memory and to its time."""
