"""A step without memory: fake tensors, and durations of ops timed alone or by a roofline."""
