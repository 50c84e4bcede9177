"""Makes a Profile from a capture and timings."""
