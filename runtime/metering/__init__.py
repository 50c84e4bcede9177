"""Meters each step: its peak and the moment of it, the memory outside the step, and who holds that."""
