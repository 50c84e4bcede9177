"""A step without memory: fake tensors, and durations of ops that run alone or are estimated by a roofline."""
