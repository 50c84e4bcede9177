"""The planning problem: one step as arrays, and what its replays need."""
